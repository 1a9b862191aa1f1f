"""vLLM's own HTTP server, on a CPU, too.

``python -m rollproof.engines.vllm.vllm_server --model DIR ...`` takes the arguments of ``vllm
serve`` and runs that server. It adds the stand-ins of
``rollproof.engines.vllm.vllm_cpu``, in this process and in the engine core that it spawns:
multiprocessing runs the main module again in each child.
"""

from __future__ import annotations

import os

__all__ = ["main"]


def main() -> None:
    """Run the server."""
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ in ("__main__", "__mp_main__"):
    from rollproof.engines.vllm import vllm_cpu

    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if vllm_cpu.is_cpu_build():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # then the worker lives in the core's process: each further one imports for half a minute
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        vllm_cpu.install()

if __name__ == "__main__":
    main()
