"""Colossal-Inference's script with a GLIDE drafter, in our words."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else "lmsys/vicuna-7b-v1.5"
GLIDE = sys.argv[2] if len(sys.argv) > 2 else "cxdu/glide-vicuna7b"

llm = LLM(
    AutoModelForCausalLM.from_pretrained(MODEL),
    tokenizer=AutoTokenizer.from_pretrained(MODEL),
    prompt_template="vicuna",
    drafter_model=GLIDE,
    use_glide_drafter=True,
)
prompt = "Write a short report of a week on a bicycle."
[answer] = llm.generate([prompt], max_length=256, do_sample=False)
print(answer.outputs[0].text)
print(f"{answer.outputs[0].stats.tokens_per_forward:.2f} tokens per forward of the model")
