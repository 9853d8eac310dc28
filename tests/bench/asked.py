"""Prompts that measurements are tested with."""

from paceline.prompts import Prompt

PROMPTS = [Prompt(None, [5, 6, 7, 8, 5, 6, 7]), Prompt(None, [9, 10, 9, 10, 9]), Prompt(None, [20] * 12)]
NAMES = ["first", "second", "third"]
