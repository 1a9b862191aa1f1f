"""A request that was aborted on the last token of its budget ends in a ValueError instead of a finished sample."""

from roll_stub import VERSION, answered, asked, postprocess_paused_data

for tokens in [7, 8, 9], [7, 8, 9, 7, 8, 9]:  # of a budget of 6
    request = asked()
    data = answered(request, tokens)
    request.batch["pre_routed_experts"] = request.batch["input_ids"][
        ..., None
    ]  # as if routes were no trouble (roll_resume.py)
    try:
        said = postprocess_paused_data(request, data, 8, 2).batch["input_ids"].tolist()
    except ValueError as error:
        said = f"{type(error).__name__}: {error}"
    print(f"roll {VERSION}: aborted after {len(tokens)} of 6 tokens: {said}")
