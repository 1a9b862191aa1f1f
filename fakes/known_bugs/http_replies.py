"""Known bugs of the wire: replies over HTTP that are read wrongly, retried wrongly, or taken for
whole when they are not.
"""

from __future__ import annotations

from rollproof.core.case import ActionKind
from rollproof.core.engine_contract import PauseMode
from rollproof.fakes.known_bugs import _http_clients as clients
from rollproof.fakes.known_bugs._planting import ENDING, act, case, request
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]

_ONE = case(flavour="sglang")
_WARM = case(flavour="sglang", requests=(request(sampling={"temperature": 0.7}),))
_CUT = case(act(ActionKind.ABORT, 3), flavour="sglang")
_QUEUED = case(act(ActionKind.ABORT, 0, queued=True), flavour="sglang")
_LONG = case(requests=(request(max_tokens=9),), flavour="sglang")
_ALIKE = case(
    requests=(request("r1", max_tokens=3), request("r10", (31, 32, 33), max_tokens=9)),
    flavour="sglang",
)
_OVERTAKEN = case(act(ActionKind.SYNC, 3), flavour="sglang", pause_mode=PauseMode.IN_PLACE)
_TENTH = case(act(ActionKind.SYNC, 3), flavour="sglang", first_version=9)
_ENDS = case(model=ENDING, requests=(request(max_tokens=24),), seed=1, flavour="sglang")

BUGS = (
    KnownBug(
        id="wire-dtype-key-ignored",
        summary=(
            "Routes that a server sends in a compact type, with its name beside them, are read as"
            " int32: a quarter of the rows."
        ),
        refs=("cf. SkyRL#1378", "cf. prime-rl#3051"),
        make=clients.IgnoresDtype,
        cases=(_ONE,),
        kills=("routes.rows",),
    ),
    KnownBug(
        id="wire-big-endian",
        summary=(
            "Routes are read in the byte order of the network, which SGLang does not use: expert 3"
            " becomes 50,331,648."
        ),
        refs=("cf. prime-rl#2813",),
        make=clients.BigEndian,
        cases=(_ONE,),
        kills=("routes.in-range",),
    ),
    KnownBug(
        id="wire-int32-as-bytes",
        summary=(
            "Routes in int32 are read byte by byte, and as many of them taken as are expected:"
            " three of four are expert 0."
        ),
        refs=("cf. prime-rl#3051",),
        make=clients.Bytes,
        cases=(_ONE,),
        kills=("routes.distinct",),
        also=("routes.captured",),
    ),
    KnownBug(
        id="wire-layers-first",
        summary=(
            "A buffer without a shape is laid out as (layers, rows, top_k): every shape is right,"
            " every row another token's."
        ),
        refs=("cf. prime-rl#2813",),
        make=clients.LayersFirst,
        cases=(_ONE,),
        kills=("routes.content",),
    ),
    KnownBug(
        id="wire-top-k-from-buffer",
        summary=(
            "How many experts a row has is reckoned from the length of the buffer, in place of"
            " being taken from the model."
        ),
        refs=("miles sglang_rollout.py::_decode_topk_buffer",),
        make=clients.TopKFromBuffer,
        cases=(_ONE,),
        kills=("routes.shape",),
        also=("routes.rows",),
    ),
    KnownBug(
        id="wire-cumulative-as-delta",
        summary=(
            "Events of a stream that each hold all tokens so far are joined as if each held the new"
            " ones."
        ),
        refs=("cf. vllm#37094",),
        make=clients.AddsCumulative,
        cases=(_ONE,),
        kills=("stitch.tokens",),
    ),
    KnownBug(
        id="wire-delta-as-cumulative",
        summary="Of a stream that tells only what is new, the last event is taken for the whole.",
        refs=("cf. sglang#34488",),
        make=clients.KeepsLastDelta,
        cases=(_ONE,),
        kills=("stitch.tokens",),
    ),
    KnownBug(
        id="wire-cut-stream-is-stop",
        summary=(
            "A stream whose connection breaks is handed over as a finished sample, with finish"
            " reason stop."
        ),
        refs=("cf. vllm#47933",),
        make=clients.CutIsEnd,
        cases=(_ONE,),
        kills=("stitch.finish-reason",),
        also=("routes.presence",),
    ),
    KnownBug(
        id="wire-short-stream-is-length",
        summary=(
            "A stream that ends early and in order, without a reason, is handed over as if the"
            " budget were used up."
        ),
        refs=("cf. AReaL#858",),
        make=clients.ShortIsLength,
        cases=(_ONE,),
        kills=("stitch.finish-length",),
        also=("routes.presence",),
    ),
    KnownBug(
        id="wire-retry-counts-both",
        summary=(
            "What a broken stream had brought is kept, the whole call is made again, and its tokens"
            " are added: the beginning twice."
        ),
        refs=("cf. AReaL#1498",),
        make=clients.CountsBoth,
        cases=(_ONE,),
        kills=("stitch.tokens",),
    ),
    KnownBug(
        id="wire-partial-token-lost",
        summary=(
            "A stack goes on from what a broken stream had brought, and hands over all of it but"
            " the last token."
        ),
        refs=("cf. sglang#34488",),
        make=clients.LosesKept,
        cases=(_LONG,),
        kills=("stitch.tokens",),
    ),
    KnownBug(
        id="wire-partial-token-sent-twice",
        summary=(
            "A stack goes on from what a broken stream had brought, and sends the last token of it"
            " twice."
        ),
        refs=("cf. vllm#22283",),
        make=clients.SendsTwice,
        cases=(_LONG,),
        kills=("stitch.resume-prompt",),
        also=("routes.rows",),
    ),
    KnownBug(
        id="wire-slow-reply-counts-twice",
        summary=(
            "A call that takes long is made again, and when both replies have come both are added."
        ),
        refs=("cf. AReaL#1498",),
        make=clients.GivesUpWaiting,
        cases=(_ONE,),
        kills=("lifecycle.one-reply-per-retry",),
    ),
    KnownBug(
        id="wire-retry-forgets-sampling",
        summary=(
            "The call that follows a status 503 is made with the server's own sampling parameters."
        ),
        refs=("cf. AReaL#1498",),
        make=clients.RetriesBare,
        cases=(_WARM,),
        kills=("stitch.sampling-params",),
    ),
    KnownBug(
        id="wire-failure-is-a-sample",
        summary=(
            "A status 503 to the call that resumes makes a finished sample of what there is, which"
            " is trained on."
        ),
        refs=("cf. slime#2124",),
        make=clients.FailureIsEnd,
        cases=(_CUT,),
        kills=("stitch.finish-length",),
        also=("lifecycle.aborts-do-not-surface",),
    ),
    KnownBug(
        id="wire-abort-by-prefix",
        summary=(
            "When a request has ended, its id is aborted once more to be sure; SGLang ends all"
            " calls whose ids begin with it."
        ),
        refs=("sglang#25561",),
        make=clients.TidiesUp,
        cases=(_ALIKE,),
        kills=("lifecycle.abort-hits-target",),
    ),
    KnownBug(
        id="wire-version-after-reply",
        summary=(
            "The server is asked for its version when the reply has come: tokens sampled before an"
            " update are tagged with the new one."
        ),
        refs=("AReaL#1569",),
        make=clients.VersionAfterwards,
        cases=(_OVERTAKEN,),
        kills=("versions.min-max",),
    ),
    KnownBug(
        id="wire-versions-as-text",
        summary=(
            "Versions are compared as the texts that the wire makes of them, so that 10 comes"
            " before 9."
        ),
        refs=("cf. slime#2260",),
        make=clients.TextOrder,
        cases=(_TENTH,),
        kills=("versions.min-max",),
    ),
    KnownBug(
        id="wire-tokens-from-text",
        summary=(
            "Ids are made anew from the text of the reply, out of which the end of the sequence was"
            " taken."
        ),
        refs=("slime#1861",),
        make=clients.TokensFromText,
        cases=(_ENDS,),
        kills=("stitch.tokens",),
    ),
    KnownBug(
        id="wire-reason-object-as-text",
        summary=(
            "SGLang's reason is an object, and is compared with the word abort: a sample that was"
            " cut off is handed over as finished."
        ),
        refs=("cf. slime#327",),
        make=clients.ReasonIsText,
        cases=(_CUT,),
        kills=("lifecycle.aborts-do-not-surface",),
        also=("stitch.finish-reason",),
    ),
    KnownBug(
        id="wire-queued-abort-key",
        summary=(
            "A key is read that the reply to a call aborted in the queue does not have: the rollout"
            " fails."
        ),
        refs=("slime#327",),
        make=clients.NeedsCounts,
        cases=(_QUEUED,),
        kills=("lifecycle.no-error-without-fault",),
    ),
    KnownBug(
        id="wire-first-row-cut",
        summary="The first row of an .npy file is cut off, as if it were the file's header.",
        refs=("cf. slime#1045",),
        make=clients.OneRowLate,
        cases=(case(),),
        kills=("routes.rows",),
    ),
)
