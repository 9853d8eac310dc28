import sys

from paceline import LLM, DraftModel, SamplingParams

# These two have different tokenizers, so drafts go through the tokens that both know.
MODEL = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-1.5b"
DRAFT = sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m"

drafter = DraftModel(DRAFT, num_draft_tokens=3, cross_vocabulary=True)
llm = LLM(MODEL, drafter=drafter, max_model_len=512, max_num_seqs=1)
messages = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
[answer] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=48))

stats = answer.outputs[0].stats
shares = [round(share, 2) for share in stats.acceptance_by_position]
print(answer.outputs[0].text)
print(f"accepted by position: {shares}")
print(f"seconds drafting {stats.draft_seconds:.2f}, checking {stats.verify_seconds:.2f}")
