"""Prompts of our own: English, Chinese and conversations. Texts only; nothing here is read from or about a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """A short name for tables, the text to be answered, and what was said before it: user, assistant, user …"""

    name: str
    text: str
    before: tuple[str, ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        said = (*self.before, self.text)
        return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]


# English

_LIGHTHOUSE = (
    "The lighthouse at Gull Point was built in 1871 from stone that was carried across the bay in fishing boats. For "
    "ninety years a keeper climbed its 112 steps every evening to light the lamp. In 1961 the lamp became electric and "
    "the last keeper, Martha Finch, moved to the village. Today the lighthouse is a small museum, and visitors climb "
    "the 112 steps to see the view from the lamp room."
)
_GARDEN = (
    "The community garden opens every Saturday at nine in the morning. Members water the vegetable beds first, because "
    "the sun is still low. At ten o'clock the compost is turned. At eleven everybody shares tea and bread under the "
    "apple tree, and the harvest is divided between the members who are there."
)
_LETTER = (
    "dear mr lopez, thank you for you're letter of the 3rd of may. we have recieve the two chairs and the table. one "
    "of the chairs have a broken leg, and the table has a scratch on it's left side. please send us a new chair before "
    "the end of the month. we will keep the table if you give us a small discount."
)
_INVENTORY = (
    "The expedition took six tents, two stoves, forty metres of rope, a first aid kit, three maps, a compass and food "
    "for eleven days. On the second day they lost one stove in the river, and on the fifth day they left two tents at "
    "the lower camp."
)
_CODE = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
"""

ENGLISH = (
    Question("summary: lighthouse", f"Summarize this paragraph in two sentences.\n\n{_LIGHTHOUSE}"),
    Question(
        "copy-edit: letter", f"Correct the spelling and grammar of this letter and write it out again.\n\n{_LETTER}"
    ),
    Question("list: inventory", f"Make a bullet list of everything the expedition took.\n\n{_INVENTORY}"),
    Question("answer: lighthouse", f"{_LIGHTHOUSE}\n\nWho was the last keeper, and what happened in 1961?"),
    Question("code: stack", f"Write this Python class again and add a method peek and a method is_empty.\n\n{_CODE}"),
    Question("rewrite: garden", f"Rewrite this text in the past tense.\n\n{_GARDEN}"),
    Question("timetable: garden", f"Write a timetable of the morning from this text.\n\n{_GARDEN}"),
    Question("open: bicycle", "Explain to a ten-year-old why a bicycle stays upright while it is moving."),
    Question("open: story", "Write a short story about a clockmaker who finds a letter inside an old clock."),
    Question("open: advice", "What should I think about before I adopt a dog?"),
)

# Chinese

_TEA = (
    "青石村的茶园在半山腰上，一共有三百二十亩。每年清明前后，村民天不亮就上山采茶，采下的嫩叶当天就要炒好。二〇一六年，"
    "村里修了一条水泥路，茶叶可以直接运到县城，不用再靠人背下山。现在村里有四十六户人家种茶，去年一共卖出干茶九千公斤。"
)
_LIBRARY = (
    "市图书馆每周二到周日开放，上午九点开门，晚上八点闭馆。一楼是报刊阅览室，二楼是儿童阅览室，三楼可以借书，四楼是自习室。"
    "每位读者最多可以借十本书，借期三十天，到期前可以续借一次。周六下午两点，二楼有故事会，小朋友不用报名就可以参加。"
)
_NOTE = (
    "王经理您好，我是三号楼的租户李明。上周五我家厨房的水管开是漏水，地板以经湿了一大片。我己经打过两次电话，可是还没有人来修。"
    "请您尽快按排师傅上门，我周末全天都在家。谢谢！"
)
_TRIP = (
    "我们这次旅行带了两顶帐篷、四个睡袋、一口锅、一盏灯、六公斤大米和三天的蔬菜。"
    "第二天，锅掉进了河里，我们又在镇上买了一口新的。"
)
_SORT = """def sort(numbers):
    for i in range(len(numbers)):
        for j in range(len(numbers) - 1):
            if numbers[j] > numbers[j + 1]:
                numbers[j], numbers[j + 1] = numbers[j + 1], numbers[j]
    return numbers
"""

CHINESE = (
    Question("摘要：茶园", f"用两句话概括下面这段文字。\n\n{_TEA}"),
    Question("改错：便条", f"改正下面这张便条里的错别字，并完整地重写一遍。\n\n{_NOTE}"),
    Question("列表：行李", f"把这次旅行带的东西列成清单。\n\n{_TRIP}"),
    Question("问答：茶园", f"{_TEA}\n\n村里哪一年修了水泥路？现在有多少户人家种茶？"),
    Question("代码：排序", f"给这个函数的每一行加上中文注释，然后完整地写出来。\n\n{_SORT}"),
    Question("改写：图书馆", f"把下面的介绍改写成一张开放时间表。\n\n{_LIBRARY}"),
    Question("翻译：图书馆", f"把下面的文字翻译成英文。\n\n{_LIBRARY}"),
    Question("开放：彩虹", "请给十岁的孩子讲一讲，雨后为什么会出现彩虹。"),
    Question("开放：故事", "写一个短故事：一位邮递员送出了一封迟到二十年的信。"),
    Question("开放：建议", "第一次养猫之前，我应该想清楚哪些事情？"),
)

# Conversations: the last message is answered

CONVERSATIONS = (
    Question(
        "recipe, then a list",
        "Now write only the shopping list, for twice as many people.",
        (
            "How do I make a simple potato soup for two people?",
            "Peel and dice 400 g of potatoes, one onion and one carrot. Fry the onion in a spoon of butter, add the "
            "potatoes, the carrot and 600 ml of vegetable stock, and cook for twenty minutes. Mash a little, stir in "
            "50 ml of cream, and season with salt, pepper and nutmeg.",
        ),
    ),
    Question(
        "letter, then politer",
        "That sounds rude. Write it again, more politely, and keep the facts.",
        (
            "Write a short message to my neighbour: his dog barks every night from eleven to one, and I start work at "
            "six.",
            "Hello, your dog barks every night from eleven to one. I start work at six in the morning. Make it stop.",
        ),
    ),
    Question(
        "function, then a fix",
        "It fails when the list is empty. Write the function again so that it returns None then.",
        (
            "Write a Python function that returns the average of a list of numbers.",
            "def average(numbers):\n    total = 0\n    for number in numbers:\n        total += number\n"
            "    return total / len(numbers)",
        ),
    ),
    Question(
        "trip, then one day",
        "We have only the second day now. Which of these would you do, and in which order?",
        (
            "We are in Lisbon for two days in May. What should we see?",
            "On the first day walk through Alfama, visit the cathedral and the castle, and take tram 28 back. On the "
            "second day go to Belém: the monastery, the tower and the pastry shop, and in the evening watch the sunset "
            "from the viewpoint at Graça.",
        ),
    ),
    Question(
        "explain, then simpler",
        "I did not understand the part about the shadow. Can you explain it once more, more simply?",
        (
            "Why does the moon change its shape?",
            "The moon does not change its shape. Half of it is always lit by the sun. While it travels around the "
            "earth we see that lit half from different sides: all of it at full moon, none of it at new moon. The "
            "shadow of the earth has nothing to do with it, except during an eclipse.",
        ),
    ),
    Question(
        "three turns: names",
        "Take the second one, and write a slogan of at most eight words for it.",
        (
            "I am opening a bicycle repair shop next to a bakery. Suggest three names.",
            "1. Spoke and Crumb\n2. The Second Gear\n3. Rolling Dough",
            "I like short names. Three more, two words at most.",
            "1. True Wheel\n2. Chain Bakery\n3. Quick Spoke",
        ),
    ),
    Question(
        "table, then sorted",
        "Sort the rows by price, the cheapest first, and write the table again.",
        (
            "Make a table of these: a blue lamp for 24 euros, a green chair for 61, a white shelf for 39, a red rug "
            "for 52.",
            "| thing | colour | price |\n|---|---|---|\n| lamp | blue | 24 |\n| chair | green | 61 |\n"
            "| shelf | white | 39 |\n| rug | red | 52 |",
        ),
    ),
    Question(
        "advice, then doubts",
        "But I only have ten minutes in the evening. Is it worth it at all?",
        (
            "I want to learn to play the guitar. How should I begin?",
            "Begin with three chords, G, C and D, and change between them slowly until it is even. Practise a little "
            "every day rather than a lot once a week, and play along with songs you like.",
        ),
    ),
)

DEMOS = {"te": ENGLISH, "tc": CHINESE, "chat": CONVERSATIONS}
