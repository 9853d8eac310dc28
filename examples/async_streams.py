import asyncio
import sys

from paceline import AsyncLLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"


async def first_sentence(llm: AsyncLLM, prompt: str) -> str:
    text = ""
    async for chunk in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=40)):
        text += chunk.text
        if "." in text:
            break  # the request ends here, and its memory is free
    return text


async def main() -> None:
    prompts = ["The wind is", "A wheel is", "The road is", "A rider is"]
    async with AsyncLLM(MODEL, drafter="suffix") as llm:
        answers = [first_sentence(llm, prompt) for prompt in prompts]
        for prompt, text in zip(prompts, await asyncio.gather(*answers)):
            print(f"{prompt!r} -> {text!r}")


asyncio.run(main())
