"""Colossal-Inference's script: model objects, and a drafter switched on and off."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else "lmsys/vicuna-7b-v1.5"
DRAFT = sys.argv[2] if len(sys.argv) > 2 else "JackFram/llama-68m"

model = AutoModelForCausalLM.from_pretrained(MODEL)
drafter_model = AutoModelForCausalLM.from_pretrained(DRAFT)
tokenizer = AutoTokenizer.from_pretrained(MODEL)  # of both models

llm = LLM(  # their InferenceConfig and InferenceEngine
    model,
    tokenizer=tokenizer,
    dtype="fp16",
    max_batch_size=1,
    max_input_len=256,
    max_output_len=256,
    block_size=16,
    max_n_spec_tokens=5,
    prompt_template="vicuna",
)
prompt = "Write a short report of a week on a bicycle."
generation_config = {
    "eos_token_id": tokenizer.eos_token_id,
    "max_length": 256,  # counts the prompt
    "num_beams": 1,
    "do_sample": False,
}

llm.set_drafter(drafter_model)  # their enable_spec_dec
[drafted] = llm.generate([prompt], generation_config=generation_config)
llm.set_drafter(None)  # their disable_spec_dec
[plain] = llm.generate([prompt], generation_config=generation_config)

print(drafted.outputs[0].text)
for name, answer in (("with", drafted), ("without", plain)):
    stats = answer.outputs[0].stats
    print(f"{name} the drafter: {stats.tokens} tokens in {stats.rounds} forwards")
