"""Complete and chat without a server: the same scheduler, in this process."""

from maitred import LLM, SamplingParams


def main() -> None:
    with LLM("maitred-mini") as llm:  # the demo model; LLM("your.gguf") for your own
        questions = ["What is maitred?", "What is a prefix cache?"]
        conversations = [[{"role": "user", "content": question}] for question in questions]
        for question, answer in zip(questions, llm.chat(conversations, SamplingParams(temperature=0, max_tokens=256))):
            print(f"{question}\n  {answer.outputs[0].text}")

        three = SamplingParams(n=3, temperature=0.8, seed=7, max_tokens=256)
        for sample in llm.chat([{"role": "user", "content": "What do you recommend?"}], three)[0].outputs:
            print(f"sample {sample.index} ({sample.finish_reason}): {sample.text}")


if __name__ == "__main__":
    main()
