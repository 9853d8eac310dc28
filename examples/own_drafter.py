"""A drafter of one's own: it remembers, for all requests, which token last followed which two."""

import sys
from collections import defaultdict

from paceline import LLM, SamplingParams
from paceline.drafters.base import Context, Observation, QuietDrafter
from paceline.drafters.tree import Proposal


class Remembering(QuietDrafter):
    """Works on the host. What it learns of one answer it uses for the next."""

    name = "remembering"  # in figures and provenance

    def __init__(self, num_draft_tokens: int = 4) -> None:
        self.max_nodes = num_draft_tokens  # no proposal is longer
        self.next: dict[tuple[int, int], int] = {}
        self.read: defaultdict[int, int] = defaultdict(int)  # by slot: how far it has read

    def observe(self, seen: Observation) -> None:
        """After every forward of the target: these tokens are permanent now."""
        for slot in seen.slot_list:
            text = seen.table.tokens.host[slot, : seen.table.length(slot)].tolist()
            for place in range(max(2, self.read[slot]), len(text)):
                self.next[text[place - 2], text[place - 1]] = text[place]
            self.read[slot] = len(text)

    def propose(self, context: Context) -> Proposal:
        """A chain for each sequence, within its budget; an empty one is fine."""
        chains = []
        for slot, budget in zip(context.slot_list, context.budget_list):
            text = context.table.tokens.host[slot, : context.table.length(slot)].tolist()[-2:]
            while len(text) < 2 + budget and tuple(text[-2:]) in self.next:
                text.append(self.next[text[-2], text[-1]])
            chains.append(text[2:])
        return Proposal.of_texts(chains, context.table.device, self.name)

    def forget(self, slots: list[int]) -> None:
        """These sequences have left; their slots will be others'."""
        for slot in slots:
            self.read.pop(slot, None)

    def reset(self) -> None:
        self.read.clear()


def test_it_changes_no_token() -> None:
    from paceline.testing import check_drafter

    checked = check_drafter(Remembering)
    assert checked.accepted > 0  # else the rest would prove little


if __name__ == "__main__":
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m", drafter=Remembering())
    question = [{"role": "user", "content": "Name three things that need wind."}]
    for time in ("first", "second"):
        [answer] = llm.chat(question, SamplingParams(temperature=0, max_tokens=40))
        print(f"the {time} time: {answer.outputs[0].stats.tokens_per_forward:.2f} tokens per forward")
