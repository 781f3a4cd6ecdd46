"""Prompts that a head is trained on where no file of them is given.

Owns three kinds, each put together from lists: questions, edits of code and rewrites of text. There are many more of each than a
run takes, and texts are new ones each time, so that a head learns to copy and not to recite. Knows nothing of models.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path

TOPICS = (
    "volcanoes", "the moon", "tea", "bicycles", "the Roman Empire", "bees", "photography", "chess", "rain", "bread", "glaciers",
    "jazz", "the stock market", "penguins", "electric cars", "vaccines", "poetry", "trains", "the printing press", "coffee",
    "football", "black holes", "gardening", "the Vikings", "whales", "chocolate", "architecture", "sleep", "wind power", "maps",
    "the human heart", "castles", "robots", "the ocean", "mathematics", "yoga", "mountains", "opera", "recycling", "dinosaurs",
    "knitting", "the Silk Road", "mushrooms", "lighthouses", "radio", "cheese", "deserts", "the violin", "earthquakes", "forests",
    "the solar system", "cats", "horses", "swimming", "running a marathon", "the pyramids", "honey", "rice", "olive oil", "wine",
    "clocks", "bridges", "tunnels", "aeroplanes", "submarines", "satellites", "comets", "tides", "clouds", "rainbows", "diamonds",
    "salt", "paper", "glass", "silk", "wool", "pottery", "sculpture", "the theatre", "the piano", "dancing", "board games",
    "puzzles", "tennis", "skiing", "sailing", "fishing", "camping", "hiking", "city parks", "museums", "libraries", "newspapers",
    "the alphabet", "dictionaries", "translation", "public speaking", "job interviews", "saving money", "taxes", "insurance",
    "online shopping", "e-mail", "video games", "computer programming", "artificial intelligence", "data privacy", "batteries",
    "solar panels", "nuclear energy", "the Amazon rainforest", "coral reefs", "spiders", "butterflies", "owls", "wolves",
)  # fmt: skip
ABOUT_TOPICS = (
    "What is interesting about {}?", "Explain {} to a ten-year-old.", "Write a short poem about {}.",
    "Give me five facts about {}.", "Why do people care about {}?", "Tell me a short story that has to do with {}.",
    "What should a beginner know about {}?", "Write a polite e-mail that asks a colleague about {}.",
    "What are common mistakes people make about {}?", "Summarise the history of {} in one paragraph.",
    "Suggest three names for a club about {}.", "What is the future of {}?", "List the advantages and disadvantages of {}.",
    "Write a quiz of three questions on {}.", "How would you teach a class on {}?", "Write a short speech about {}.",
    "Which book on {} should I read, and why?", "What would the world be like without {}?",
)  # fmt: skip
CITIES = (
    "Paris", "Lisbon", "Vienna", "New York", "Istanbul", "Cairo", "Sydney", "Prague", "Toronto", "Mumbai", "Athens", "Dublin",
    "Seoul", "Madrid", "Oslo", "Chicago", "Nairobi", "Lima", "Edinburgh", "Bangkok",
)  # fmt: skip
ABOUT_CITIES = (
    "What should I see in a weekend in {}?", "Write a postcard from {} to a friend.", "What is {} known for?",
    "Plan two days in {} with children.", "What is the weather like in {} in spring?",
)  # fmt: skip
COUNTRIES = (
    "France", "Brazil", "Canada", "Egypt", "India", "Kenya", "Norway", "Peru", "Spain", "Thailand", "Mexico", "Poland", "Greece",
    "Australia", "Germany", "Chile", "Turkey", "Vietnam", "Ireland", "Morocco",
)  # fmt: skip
ABOUT_COUNTRIES = (
    "What is the oldest town of {}?", "Which languages are spoken in {}?", "What do people eat in {}?", "Describe the flag of {}.",
    "When is the best time to visit {}?",
)  # fmt: skip
FOODS = (
    "lentil soup", "apple pie", "fried rice", "potato salad", "banana bread", "tomato sauce", "lemonade", "vegetable curry",
    "scrambled eggs", "pizza", "oat cookies", "chicken stew", "guacamole", "garlic bread", "mashed potatoes", "fruit salad",
)  # fmt: skip
ABOUT_FOODS = ("Give me a simple recipe for {}.", "What goes well with {}?", "How can I make {} healthier?", "Where is {} from?")
ANIMALS = (
    "brown dog", "white horse", "small owl", "green parrot", "lazy tortoise", "young wolf", "black goat", "shy rabbit", "old bear",
    "spotted cow", "clever raven", "hedgehog", "goldfish", "red squirrel", "wild goose", "sea lion",
)  # fmt: skip
ABOUT_ANIMALS = (
    "Suggest two titles for a film about a {}.", "Write a short poem about a {} in the rain.", "Tell a bedtime story about a {}.",
    "What does a {} eat?",
)  # fmt: skip
PEOPLE = ("a colleague", "my neighbour", "a customer", "my landlord", "an old friend", "my teacher", "a new employee", "my sister")
SITUATIONS = (
    "is late with a report", "has just moved", "got married", "lost a parcel", "found my keys", "wants to learn the piano",
    "missed a meeting", "passed an exam", "is going on holiday", "helped me with a project", "has a birthday", "broke a window",
)  # fmt: skip
ABOUT_PEOPLE = ("Write a short e-mail to {} who {}.", "What can I say to {} who {}?")
THINGS = (
    "the sea salty", "snow white", "the desert dry", "gold expensive", "ice slippery", "the grass green", "fire hot", "lemon sour",
    "the night dark", "Mars red", "bread soft inside", "exercise healthy", "sugar sweet", "summer warmer than winter",
    "glass transparent", "iron magnetic", "wood a good fuel", "the moon sometimes thin", "steel so strong", "blood red",
)  # fmt: skip
IDEAS = (
    "gravity", "electricity", "evolution", "inflation", "democracy", "the water cycle", "fractions", "magnetism", "the internet",
    "insurance", "germs", "digestion", "the seasons", "sound", "interest on a loan", "an eclipse", "friction", "the alphabet",
)  # fmt: skip
ABOUT_IDEAS = ("Explain {} in simple words.", "How does one measure {}?", "Give an example of {}.", "Who first described {}?")

NOUNS = (
    ("values", "value"), ("lines", "line"), ("scores", "score"), ("prices", "price"), ("items", "item"), ("points", "point"),
    ("ages", "age"), ("dates", "date"), ("weights", "weight"), ("users", "user"), ("orders", "order"), ("files", "file"),
)  # fmt: skip
FUNCTIONS = (
    "def largest_{x}({xs}):\n    best = {xs}[0]\n    for {x} in {xs}:\n        if {x} > best:\n            best = {x}\n"
    "    return best",
    "def unique_{xs}({xs}):\n    seen = []\n    for {x} in {xs}:\n        if {x} not in seen:\n            seen += [{x}]\n"
    "    return seen",
    "def positive_{xs}({xs}):\n    kept = []\n    for {x} in {xs}:\n        if {x} > 0:\n"
    "            kept.append({x})\n    return kept",
    "class {x}_store:\n    def __init__(self):\n        self.{xs} = []\n\n"
    "    def insert(self, {x}):\n        self.{xs}.append({x})",
    "def clamp_{x}({x}, low, high):\n    if {x} < low:\n        return low\n"
    "    if {x} > high:\n        return high\n    return {x}",
    "def backwards({xs}):\n    result = []\n    for {x} in {xs}:\n        result.insert(0, {x})\n    return result",
    "def has_{x}({xs}, name):\n    for {x} in {xs}:\n        if {x}.name == name:\n            return True\n    return False",
    "def show_{xs}({xs}):\n    for i, {x} in enumerate({xs}):\n        print(i + 1, {x})\n    print('done')",
    "def sums_of_{xs}({xs}):\n    sums = [0]\n    for {x} in {xs}:\n        sums.append(sums[-1] + {x})\n    return sums[1:]",
    "def join_{xs}({xs}, mark=', '):\n    text = ''\n    for {x} in {xs}:\n        text += str({x}) + mark\n    return text",
    "def double_{xs}({xs}):\n    return [2 * {x} for {x} in {xs}]",
    "def group_{xs}({xs}, size):\n    groups = []\n    start = 0\n    while start < len({xs}):\n"
    "        groups.append({xs}[start:start + size])\n        start += size\n    return groups",
    "def save_{xs}({xs}, path):\n    with open(path, 'w') as out:\n"
    "        for {x} in {xs}:\n            out.write(str({x}) + '\\n')",
    "def by_name({xs}):\n    table = {{}}\n    for {x} in {xs}:\n        table[{x}.name] = {x}\n    return table",
    "def pairs_of_{xs}({xs}):\n    for i in range(len({xs})):\n        for j in range(i):\n            yield {xs}[i], {xs}[j]",
    "class Box:\n    def __init__(self, {x}, size):\n        self.{x} = {x}\n        self.size = size\n\n"
    "    def area(self):\n        return self.size * self.size",
    "def first_{x}({xs}, default=None):\n    if not {xs}:\n        return default\n    return {xs}[0]",
    "def without_last({xs}):\n    copy = list({xs})\n    copy.pop()\n    return copy",
    "def smaller_{xs}({xs}, limit):\n    num = 0\n    for {x} in {xs}:\n        if {x} < limit:\n"
    "            num += 1\n    return num",
    "def ask_for_{x}(question):\n    answer = input(question)\n    while not answer:\n"
    "        answer = input(question)\n    return answer",
)
CODE_TASKS = (
    "Write a comment above the last line of this code and print it all:",
    "Add a docstring to this code and print all of it again:",
    "Rename the loop variable of this code to `entry` and print all of it again:",
    "Repeat this code:",
    "Add a line at the end that calls this code, and print all of it:",
    "Explain what this code does:",
)

WHO = (
    "The baker", "My uncle", "A young doctor", "The old captain", "Our neighbour", "The mayor of the town", "A group of students",
    "The night guard", "Her eldest son", "The new teacher", "A retired pilot", "The gardener", "One of the sailors",
    "The librarian", "A painter from the north", "The youngest of the sisters", "The postman", "A famous singer",
    "The owner of the hotel", "The farmer",
)  # fmt: skip
DID = (
    "repaired the clock in the hall", "sold a box of apples", "wrote a long letter to the council", "opened the gate of the garden",
    "lost a pair of gloves", "found a silver coin", "painted the door of the shed", "carried the boxes to the cellar",
    "bought three tickets for the ferry", "forgot the name of the street", "planted a row of cherry trees",
    "told a story about a storm", "closed all the windows", "borrowed a map of the hills", "counted the sheep on the meadow",
    "cooked soup for twenty guests",
    "sent a parcel to the capital", "cleaned the stairs of the tower", "drew a picture of the harbour", "read the newspaper aloud",
)  # fmt: skip
WHEN = (
    "on a cold morning", "before the shops opened", "in the summer of {year}", "at half past {hour}", "after the long meeting",
    "while it was raining", "without telling anyone", "for the second time", "as the sun went down", "on the way to the station",
    "in less than {hour} minutes", "with the help of a friend", "although nobody had asked", "near the old bridge", "on Thursday",
)  # fmt: skip
THEN = (
    "It was the first time in {year} that this had happened.", "About {many} people heard of it.", "Nobody was surprised.",
    "The next day everything was as before.", "It took {hour} hours and cost {many} dollars.", "Since {year} it has been a custom.",
    "Later this was written down in a book.", "Some of the children laughed.", "There is a photograph of it in the museum.",
)  # fmt: skip
HOURS = ("four", "five", "six", "seven", "eight", "nine", "ten", "eleven")
TEXT_TASKS = (
    "Copy this text, and put its last sentence first:",
    "Correct the spelling of this text and print all of it:",
    "Repeat this text:",
    "Write this text again, each sentence on a line of its own:",
    "Summarise this text in one sentence:",
)


def make_prompts(num: int, seed: int = 0) -> list[str]:
    """Different prompts of three kinds: half are questions, a quarter edits of code, a quarter rewrites of text.

    Raises:
      ValueError: more are wanted than there are of a kind.
    """
    rng = random.Random(seed)
    quarter = num // 4
    questions, code = _questions(), _edits_of_code()
    found: list[str] = []
    for kind, some, n in (("questions", questions, num - 2 * quarter), ("edits of code", code, quarter)):
        if n > len(some):
            raise ValueError(
                f"num_prompts={num} needs {n} {kind}, and {len(some)} can be made: lower it, or give a file of prompts"
            )
        found += rng.sample(some, n)
    rewrites: dict[str, None] = {}
    while len(rewrites) < quarter:
        rewrites[f"{rng.choice(TEXT_TASKS)}\n\n{_text(rng)}"] = None
    found += rewrites
    rng.shuffle(found)
    return found


def _questions() -> list[str]:
    fillings = (
        (ABOUT_TOPICS, TOPICS), (ABOUT_CITIES, CITIES), (ABOUT_COUNTRIES, COUNTRIES), (ABOUT_FOODS, FOODS),
        (ABOUT_ANIMALS, ANIMALS), (("Why is {}?",), THINGS), (ABOUT_IDEAS, IDEAS),
    )  # fmt: skip
    found = [question.format(word) for questions, words in fillings for question, word in itertools.product(questions, words)]
    return found + [question.format(*words) for question, *words in itertools.product(ABOUT_PEOPLE, PEOPLE, SITUATIONS)]


def _edits_of_code() -> list[str]:
    parts: Iterable[tuple[str, str, tuple[str, str]]] = itertools.product(CODE_TASKS, FUNCTIONS, NOUNS)
    return [f"{task}\n\n```python\n{function.format(xs=xs, x=x)}\n```" for task, function, (xs, x) in parts]


def _text(rng: random.Random) -> str:
    """Three to five sentences, of which hardly any two prompts have one in common."""
    parts = (rng.sample(words, rng.randint(2, 3)) for words in (WHO, DID, WHEN))
    sentences = [f"{who} {did} {when}." for who, did, when in zip(*parts, strict=False)]
    sentences[1:1] = rng.sample(THEN, rng.randint(1, 2))
    return " ".join(sentences).format(year=rng.randint(1700, 2000), hour=rng.choice(HOURS), many=rng.randint(12, 900))


def read_prompts(path: str | Path) -> list[str]:
    """The prompts of a file of JSON lines, {"prompt": text} each. ValueError names the first line that is none."""
    found = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            prompt = json.loads(line)["prompt"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f'{path}, line {number} is not {{"prompt": text}} ({type(error).__name__}: {error})') from None
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"{path}, line {number}: prompt={prompt!r} must be a text that is not empty")
        found.append(prompt)
    return found
