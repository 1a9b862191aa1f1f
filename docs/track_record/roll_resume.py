"""A request that was aborted never goes on: the routes that it does not have are put into its batch as None, which no batch can hold."""

from roll_stub import VERSION, answered, asked, postprocess_paused_data

for others in {"routed_experts": None}, {}:  # as the router's client writes it; as if it did not
    request = asked()
    try:
        said = (
            postprocess_paused_data(request, answered(request, [7, 8], **others), 8, 2)
            .batch["input_ids"]
            .tolist()
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, it is shown
        said = f"{type(error).__name__}: {error}"
    print(f"roll {VERSION}: aborted after 2 tokens, meta_info with {sorted(others)}: {said}")
