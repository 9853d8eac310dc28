"""Colossal-Inference's script as it is: only the two lines that import are changed."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import paceline.compat.colossal as colossalai
from paceline.compat.colossal import GenerationConfig, InferenceConfig, InferenceEngine

MODEL = sys.argv[1] if len(sys.argv) > 1 else "lmsys/vicuna-7b-v1.5"
DRAFT = sys.argv[2] if len(sys.argv) > 2 else "JackFram/llama-68m"

colossalai.launch_from_torch(config={})  # has no effect here, and says so
model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
drafter_model = AutoModelForCausalLM.from_pretrained(DRAFT)

inference_config = InferenceConfig(
    dtype="fp16",
    max_batch_size=1,
    max_input_len=256,
    max_output_len=256,
    max_n_spec_tokens=5,
    prompt_template="vicuna",
)
engine = InferenceEngine(model, tokenizer, inference_config)
generation_config = GenerationConfig(
    eos_token_id=tokenizer.eos_token_id,
    max_length=256,  # counts the prompt
    num_beams=1,
    do_sample=False,
)
prompt = "Write a short report of a week on a bicycle."

engine.enable_spec_dec(drafter_model)
drafted = engine.generate(prompts=[prompt], generation_config=generation_config)
engine.disable_spec_dec()
plain = engine.generate(prompts=[prompt], generation_config=generation_config)
print(drafted)
print("the same without the drafter:", drafted == plain)
