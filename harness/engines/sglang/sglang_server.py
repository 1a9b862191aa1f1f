"""SGLang's own HTTP server, on a CPU.

``python -m rollproof.engines.sglang.sglang_server --model-path DIR ...`` takes the arguments of
``python -m sglang.launch_server`` and runs that. It adds the stand-ins of
``rollproof.engines.sglang.sglang_cpu``, in this process and in all that it spawns: multiprocessing
runs the main module again in each child.
"""

from __future__ import annotations

import os
import sys

__all__ = ["CPU_ARGUMENTS", "main"]

CPU_ARGUMENTS = (
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--sampling-backend",
    "pytorch",
    "--grammar-backend",
    "none",
    "--disable-overlap-schedule",
    "--disable-cuda-graph",
    "--skip-server-warmup",
    "--mem-fraction-static",
    "0.1",
)
"""Options that SGLang needs on a CPU without its kernels; the caller's arguments follow them."""


def main() -> None:
    """Run the server."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args([*CPU_ARGUMENTS, *sys.argv[1:]]))


if __name__ in ("__main__", "__mp_main__"):
    from rollproof.engines.sglang import sglang_cpu

    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "0")
    sglang_cpu.install()

if __name__ == "__main__":
    main()
