"""The three tasks that drafts are measured on, eight prompts each: texts to rewrite, code to edit, and ordinary chat.

None of them is among the prompts that heads are trained on.
"""

from __future__ import annotations

PARAGRAPHS = (
    "The lighthouse at the end of the harbour was built in 1871, after two ships were lost on the rocks in a single winter. Its "
    "keeper lived in the small white house below, and climbed the stairs four times each night to wind the clockwork of the lamp.",
    "Bread is made from flour, water, salt and yeast. The dough is mixed, left to rise for two hours, folded, and left to rise "
    "again. It is then baked in a hot oven for forty minutes, until the crust is dark and the loaf sounds hollow when tapped.",
    "Our team will move to the new office on the third of March. Please pack your desk by Friday afternoon, label each box with "
    "your name and room number, and leave your keys at the front desk. The movers will come on Saturday morning at eight.",
    "Rivers carry sand and stones from the mountains to the sea. Where the water slows down it can carry less, and what it drops "
    "builds banks, islands and deltas. A delta grows by a few metres each year, and some of the largest cities stand on one.",
    "The museum opens at ten and closes at six, except on Mondays, when it stays shut. Tickets cost nine euros; children under "
    "twelve come in free. Large bags are left in the cloakroom, and photographs may be taken anywhere but in the room of maps.",
    "A beaver dam begins with a few branches pushed into the mud of the stream. Stones and more branches are laid on top, and the "
    "gaps are filled with leaves and clay. Behind it a pond slowly rises, deep enough that its bottom does not freeze in winter.",
    "The night train leaves Vienna at half past seven in the evening and reaches Venice shortly after eight. Passengers in the "
    "sleeping car are woken an hour before, with coffee and a warm roll. Bicycles need a ticket of their own, bought in advance.",
    "My grandmother kept her recipes in a tin box, each on a card in her small upright hand. The oldest were for soups, without "
    "any amounts, since everybody knew them. The newest was for a lemon cake, and on its back she had noted who had liked it.",
)
CODE = (
    """def count_words(text):
    counts = {}
    for word in text.split():
        if word in counts:
            counts[word] = counts[word] + 1
        else:
            counts[word] = 1
    return counts""",
    """def read_lines(path):
    lines = []
    file = open(path)
    for line in file:
        line = line.strip()
        if line:
            lines.append(line)
    file.close()
    return lines""",
    """class Counter:
    def __init__(self):
        self.value = 0

    def add(self, amount):
        self.value = self.value + amount

    def reset(self):
        self.value = 0""",
    """def find(values, wanted):
    low = 0
    high = len(values) - 1
    while low <= high:
        middle = (low + high) // 2
        if values[middle] == wanted:
            return middle
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle - 1
    return -1""",
    """def average(numbers):
    if len(numbers) == 0:
        return 0.0
    total = 0.0
    for number in numbers:
        total = total + number
    return total / len(numbers)""",
    """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def is_empty(self):
        return len(self.items) == 0""",
    """def is_prime(number):
    if number < 2:
        return False
    divisor = 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor = divisor + 1
    return True""",
    """def merge(left, right):
    merged = []
    while left and right:
        if left[0] <= right[0]:
            merged.append(left.pop(0))
        else:
            merged.append(right.pop(0))
    return merged + left + right""",
)
QUESTIONS = (
    "What is the capital of Japan?",
    "Why is the sky blue?",
    "Write a short e-mail to a colleague who is ill.",
    "What should I see in a day in Rome?",
    "Write a short poem about a fox in the snow.",
    "Explain photosynthesis to a ten-year-old.",
    "Suggest three names for a grey cat.",
    "Give me a simple recipe for pancakes.",
)
TASKS = {
    "rewrite": tuple(f"Repeat this text word for word, and change only its first word:\n\n{text}" for text in PARAGRAPHS),
    "code": tuple(f"Add a comment to the first line of this code and print all of it again:\n\n```python\n{c}\n```" for c in CODE),
    "chat": QUESTIONS,
}
