"""Medusa heads: one guess for each token ahead, as a chain and as a published tree."""

import sys

from paceline import LLM, Medusa, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "lmsys/vicuna-7b-v1.3"
HEADS = sys.argv[2] if len(sys.argv) > 2 else "FasterDecoding/medusa-vicuna-7b-v1.3"

llm = LLM(MODEL, max_model_len=512, max_num_seqs=1)
prompt = "The rider in front breaks the wind, and"
params = SamplingParams(temperature=0.7, seed=1, max_tokens=48)

for tree in (None, "mc_sim_7b_63"):
    llm.set_drafter(Medusa(HEADS, tree=tree))
    [answer] = llm.generate([prompt], params)
    stats = answer.outputs[0].stats
    print(f"{tree or 'chain'}: {stats.tokens_per_forward:.2f} tokens per forward of the model")
    print(answer.outputs[0].text)
