"""An urgent request goes first although it came last, and the patient ones still get their whole answer."""

from maitred import LLM, SamplingParams


def main() -> None:
    prompts = ["Could I see the menu, please?"] * 3
    with LLM(policy="priority", max_num_seqs=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        outputs = llm.generate(prompts, params, priority=[5, 5, 0])
        for name, output in zip(["patient", "patient", "urgent"], outputs):
            timing = output.outputs[0].timing
            if timing is not None:
                print(f"{name:8} waited {timing.queue_s * 1000:6.1f} ms, answered in {timing.total_s * 1000:6.1f} ms")


if __name__ == "__main__":
    main()
