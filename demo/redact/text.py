#!/usr/bin/env python3
"""Generate texts with marked private spans, for training and for measuring.

    python demo/redact/text.py --count 3            # texts as the model is trained on
    python demo/redact/text.py --count 3 --held-out

A text is a few paragraphs. A paragraph is a template of pools.py whose slots are filled: `{person}` and the like with
a private value, `{word}` and the like with an ordinary one. Everything is made up: names are common ones or random
syllables, numbers are random. Held-out texts share no template, name, street, city or domain with training.
"""

import argparse
import random
import re
import string

from pools import (
    ADJECTIVES,
    CUES,
    ENDINGS,
    EVERYDAY,
    FUNCTION_WORDS,
    MONTHS,
    RELATIVES,
    STARTS,
    SYLLABLES,
    TITLES,
    VERBS,
    WEEKDAYS,
    WORDS,
    pools,
)

KINDS = [
    "account_number",
    "private_address",
    "private_date",
    "private_email",
    "private_person",
    "private_phone",
    "private_url",
    "secret",
]
# Share of paragraphs without a template.
LOOSE = 0.65
# Slots of ordinary values.
ORDINARY = "word Word number longnumber price version time weekday month year company city Phrase title".split()
# Text before a field, between fields and after a field, and at the ends; two braces stand for one.
FORMS = [
    ("NAME: ", "\n", "", ("", "")),
    ("NAME = ", "\n", "", ("", "")),
    ("NAME=", " ", "", ("", "")),
    ("NAME=", "&", "", ("?", "")),
    ("<NAME>", "", "</NAME>", ("", "")),
    ("<td>", "", "</td>", ("<tr>", "</tr>")),
    ('"NAME": "', ", ", '"', ("{{", "}} ")),
    ('NAME = "', "\n", '"', ("", "")),
    ("", ",", "", ("", "")),
    ("", "; ", "", ("", "")),
    ("", " | ", "", ("| ", " |")),
    ("- NAME: ", "\n", "", ("", "")),
    ("", ", ", "", ("", "")),
    ("NAME (", ", ", ")", ("", "")),
]


class Writer:
    """Writes texts with a random generator of its own."""

    def __init__(self, seed: int | str, held_out: bool = False):
        self.r = random.Random(f"{seed} {held_out}")
        self.held_out, self.pools = held_out, pools(held_out)

    def text(self) -> tuple[str, list[tuple[int, int, str]]]:
        """A text and its spans: start, end (in characters) and kind, in order."""
        parts, spans, at = [], [], 0
        lower = self.r.random() < 0.03
        for _ in range(self.r.randint(1, 7)):
            loose = self.r.random() < LOOSE and not self.held_out
            paragraph, own = self.loose() if loose else self.paragraph(self.r.choice(self.pools["template"]))
            if lower and len(paragraph.lower()) == len(paragraph):
                paragraph = paragraph.lower()
            separator = self.r.choice(["\n", "\n", "\n\n", " ", " ", " "]) if parts else ""
            at += len(separator)
            spans += [(start + at, end + at, kind) for start, end, kind in own]
            parts += [separator, paragraph]
            at += len(paragraph)
        return "".join(parts), spans

    def paragraph(self, template: str) -> tuple[str, list[tuple[int, int, str]]]:
        out, spans = "", []
        pieces = template.replace("\\n", "\n").replace("{{", "\0").replace("}}", "\1").split("{")
        for index, piece in enumerate(pieces):
            slot, _, rest = piece.partition("}") if index else ("", "", piece)
            if slot:
                value, kind = self.value(slot)
                if kind:
                    spans.append((len(out), len(out) + len(value), kind))
                out += value
            out += self.noisy(rest).replace("\0", "{").replace("\1", "}")
        return out, spans

    def noisy(self, text: str) -> str:
        """A template's own text, in training with some of its words replaced, so that templates aren't learned by heart."""
        if self.held_out or self.r.random() < 0.3:
            return text
        other = lambda word: self.common() if self.r.random() < 0.15 else word[0]  # noqa: E731
        return re.sub(r"\b[a-z]{3,}\b", other, text)

    def loose(self) -> tuple[str, list[tuple[int, int, str]]]:
        """A paragraph without a template: values among random words, or in the fields of a form, a table or code."""
        parts, slot = [], lambda: self.r.choice([*CUES, "person", "person", "first", "first", "first"])  # noqa: E731
        form = self.r.random()
        if form < 0.6:
            for _ in range(self.r.randint(1, 6)):
                parts.append(" ".join(self.common() for _ in range(self.r.randint(0, 7))))
                if self.r.random() < 0.4:
                    kind = slot()
                    parts += [self.r.choice(CUES[kind][0]), "{" + kind + "}"]
                elif self.r.random() < 0.3:
                    parts.append("{" + self.r.choice(ORDINARY) + "}")
                parts.append(self.r.choice(["", "", "", ",", ",", ".", ";", ":", "?", " -", "!"]))
            text = re.sub(r" +([,.;:?!])", r"\1", " ".join(part for part in parts if part))
            text = re.sub(r"(^|[.?!] )([a-z])", lambda found: found[1] + found[2].upper(), text)
        elif form < 0.7:
            words = " ".join(self.common() for _ in range(self.r.randint(1, 3))).capitalize()
            text = self.r.choice(
                [
                    f"{words},\n{{person}}",
                    f"{words},\n{{first}}",
                    f"{words}, {{person}}",
                    f"{words} {{first}},",
                    f"{words} {{first}}!",
                ]
            )
        else:
            before, between, after, end = self.r.choice(FORMS)
            for _ in range(self.r.randint(1, 4)):
                kind = slot() if self.r.random() < 0.7 else self.r.choice(ORDINARY)
                name = self.r.choice(CUES[kind][1].split() if kind in CUES else EVERYDAY)
                name = self.r.choice([name, name, name.upper(), name.capitalize(), f"{self.word()}_{name}"])
                parts.append(f"{before.replace('NAME', name)}{{{kind}}}{after.replace('NAME', name)}")
            text = end[0] + between.join(parts) + end[1]
        return self.paragraph(text)

    def value(self, slot: str) -> tuple[str, str | None]:
        kinds = {
            "person": "private_person",
            "lowperson": "private_person",
            "first": "private_person",
            "last": "private_person",
            "full": "private_person",
            "address": "private_address",
            "date": "private_date",
            "email": "private_email",
            "phone": "private_phone",
            "url": "private_url",
            "account": "account_number",
            "card": "account_number",
            "sortcode": "account_number",
            "ssn": "account_number",
            "passport": "account_number",
            "password": "secret",
            "pin": "secret",
            "secret": "secret",
        }
        return getattr(self, slot)(), kinds.get(slot)

    # private values

    def invented(self) -> str:
        name = "".join(self.r.choices(SYLLABLES, k=self.r.randint(1, 3))) + self.r.choice(ENDINGS)
        return name.capitalize()

    def of(self, name: str, invented: float = 0.3) -> str:
        return self.invented() if self.r.random() < invented else self.r.choice(self.pools[name])

    def first(self) -> str:
        return self.of("first")

    def last(self) -> str:
        last = self.of("last")
        return f"{last}-{self.of('last')}" if self.r.random() < 0.06 else last

    def full(self) -> str:
        return f"{self.first()} {self.last()}"

    def person(self) -> str:
        form = self.r.random()
        first, last = self.first(), self.last()
        if form < 0.7:
            return f"{first} {last}"
        if form < 0.76:
            return f"{first[0]}. {last}"
        if form < 0.84:
            return f"{first} {self.r.choice(string.ascii_uppercase)}. {last}"
        if form < 0.9:
            return f"{first} {self.first()} {last}"
        if form < 0.93:
            return f"{first} {self.r.choice(['van', 'de', 'von', 'al', 'da', 'van der'])} {last}"
        return f"{first} {last}".upper() if form < 0.96 else first

    def lowperson(self) -> str:
        name = f"{self.first()} {self.last()}"
        return name.lower() if len(name.lower()) == len(name) else name

    def digits(self, count: int) -> str:
        return "".join(self.r.choices(string.digits, k=count))

    def address(self) -> str:
        street, city = self.of("street"), self.of("city", 0.15)
        house = str(self.r.randint(1, 9999 if self.r.random() < 0.3 else 250)) + self.r.choice(
            ["", "", "", "", "a", "B"]
        )
        way = self.r.choice(
            "Street Road Lane Avenue Drive Close Way Court Place Square St Ave Rd Blvd St. Terrace".split()
        )
        letters = lambda n: "".join(self.r.choices("ABCDEFGHLMNPRSTUWXY", k=n))  # noqa: E731
        code = self.r.choice(
            [
                f"{letters(self.r.randint(1, 2))}{self.r.randint(1, 29)} {self.r.randint(1, 9)}{letters(2)}",
                f"{letters(2)} {self.digits(5)}",
                self.digits(5),
            ]
        )
        comma = self.r.choice([", ", ", ", ", ", "\n"])
        form = self.r.random()
        if form < 0.4:
            return f"{house} {street} {way}{comma}{city} {code}"
        if form < 0.52:
            return f"{house} {street} {way}{comma}{city}"
        if form < 0.64:
            return f"{house} {street} {way}"
        if form < 0.74:
            flat = self.r.choice(["Flat", "Apt", "Unit", "Suite", "Apartment"])
            return f"{flat} {self.r.randint(1, 60)}, {house} {street} {way}{comma}{city} {code}"
        if form < 0.82:
            return (
                f"{house} {street} {way}, {self.r.choice(['Apt', 'Unit', '#'])} {self.r.randint(1, 60)}, {city}, {code}"
            )
        if form < 0.92:
            ending = self.r.choice(["straße", "weg", "gasse", "gatan", "laan", "platz"])
            return f"{street}{ending} {house}{comma}{self.digits(5)} {city}"
        if form < 0.97:
            return f"{house} {self.r.choice(['rue de', 'rue du', 'Calle', 'Via', 'Rua', 'avenue'])} {street}{comma}{self.digits(5)} {city}"
        return f"PO Box {self.r.randint(10, 9999)}, {city}"

    def date(self) -> str:
        day, month, year = self.r.randint(1, 28), self.r.randint(1, 12), self.r.randint(1930, 2029)
        name = MONTHS[month - 1]
        return self.r.choice(
            [
                f"{day} {name} {year}",
                f"{name} {day}, {year}",
                f"{name[:3]} {day}, {year}",
                f"{day} {name[:3]} {year}",
                f"{year}-{month:02}-{day:02}",
                f"{year}-{month:02}-{day:02}",
                f"{day:02}/{month:02}/{year}",
                f"{month}/{day}/{year % 100:02}",
                f"{day:02}.{month:02}.{year}",
                f"{day} {name}",
                f"{name} {day}",
                f"the {day}th of {name}",
            ]
        )

    def plain(self, name: str) -> str:
        return "".join(c for c in name.lower() if c in string.ascii_lowercase) or "mail"

    def host(self) -> str:
        name = self.plain(self.of("domain", 0.4))
        if self.r.random() < 0.25:
            name += self.r.choice(["-", ""]) + self.plain(self.of("domain", 0.4))
        return f"{name}.{self.r.choice('com com com org net io example co.uk de fr dev ai edu eu'.split())}"

    def email(self) -> str:
        first, last = self.plain(self.first()), self.plain(self.last())
        local = self.r.choice(
            [
                f"{first}.{last}",
                f"{first}{last}",
                f"{first[0]}.{last}",
                f"{first[0]}{last}",
                f"{first}_{last}{self.digits(2)}",
                f"{first}{self.digits(self.r.randint(1, 4))}",
                f"{last}+{self.r.choice(WORDS)}",
                self.r.choice(WORDS),
                first,
            ]
        )
        return f"{local}@{self.host()}"

    def phone(self) -> str:
        d = self.digits
        return self.r.choice(
            [
                f"({d(3)}) {d(3)}-{d(4)}",
                f"{d(3)}-{d(3)}-{d(4)}",
                f"{d(3)}-{d(4)}",
                f"+1 {d(3)} {d(3)} {d(4)}",
                f"+1-{d(3)}-{d(3)}-{d(4)}",
                f"+44 {d(2)} {d(4)} {d(4)}",
                f"+44 7{d(3)} {d(6)}",
                f"07{d(3)} {d(6)}",
                f"0{d(2)} {d(4)} {d(4)}",
                f"+{d(2)} {d(3)} {d(7)}",
                f"+49 (0){d(2)} {d(7)}",
                f"+33 {d(1)} {d(2)} {d(2)} {d(2)} {d(2)}",
                f"+{d(11)}",
                f"0{d(3)}/{d(6)}",
            ]
        )

    def url(self) -> str:
        host = self.host()
        path = "/".join(
            self.r.choices(
                [self.word(), self.plain(self.first()), self.digits(4), self.token(8)], k=self.r.randint(0, 3)
            )
        )
        query = f"?{self.word()}={self.token(self.r.randint(4, 12))}" if self.r.random() < 0.3 else ""
        start = self.r.choice(["https://", "https://", "https://www.", "http://", "www.", f"https://{self.word()}."])
        return f"{start}{host}{'/' if path or query else ''}{path}{query}"

    def account(self) -> str:
        d = self.digits
        country = self.r.choice("DE GB FR NL ES IT CH AT BE PL".split())
        return self.r.choice(
            [
                f"{country}{d(2)} " + " ".join(d(4) for _ in range(self.r.randint(3, 5))) + f" {d(2)}",
                f"{country}{d(self.r.randint(18, 22))}",
                f"{country}{d(2)} {self.token(4, string.ascii_uppercase)} "
                + " ".join(d(4) for _ in range(3))
                + f" {d(2)}",
                f"{country}{d(2)}{''.join(self.r.choices(string.ascii_uppercase, k=4))}{d(14)}",
                d(8),
                d(10),
                d(12),
                f"{d(3)}-{d(5)}-{d(2)}",
                f"{self.r.choice(string.ascii_uppercase)}{d(7)}",
            ]
        )

    def card(self) -> str:
        separator = self.r.choice([" ", " ", "-", ""])
        return separator.join(self.digits(4) for _ in range(4))

    def sortcode(self) -> str:
        return "-".join(self.digits(2) for _ in range(3))

    def ssn(self) -> str:
        return f"{self.digits(3)}-{self.digits(2)}-{self.digits(4)}"

    def passport(self) -> str:
        return "".join(self.r.choices(string.ascii_uppercase, k=self.r.randint(1, 2))) + self.digits(
            self.r.randint(6, 8)
        )

    def token(self, count: int, letters: str = string.ascii_letters + string.digits) -> str:
        return "".join(self.r.choices(letters, k=count))

    def secret(self) -> str:
        t = self.token
        return self.r.choice(
            [
                f"sk-{t(self.r.randint(20, 40))}",
                f"sk_live_{t(24)}",
                f"ghp_{t(36)}",
                f"AKIA{t(16, string.ascii_uppercase + string.digits)}",
                f"xoxb-{self.digits(11)}-{t(20)}",
                f"eyJ{t(20)}.{t(24)}.{t(16, string.ascii_letters + string.digits + '-_')}",
                t(32, "0123456789abcdef"),
                t(40, string.ascii_letters + string.digits + "+/"),
                f"{t(8)}-{t(8)}-{t(8)}",
            ]
        )

    def password(self) -> str:
        word = self.r.choice([self.word(), self.plain(self.first()), self.invented()])
        mark = self.r.choice("!#$%&*?@_-")
        return self.r.choice(
            [
                f"{word.capitalize()}{self.digits(self.r.randint(2, 4))}{mark}",
                f"{word}{mark}{self.word()}{self.digits(2)}",
                f"{self.word()}-{self.word()}-{self.word()}",
                f"{word.replace('o', '0').replace('e', '3')}{self.digits(2)}",
                self.token(self.r.randint(8, 14), string.ascii_letters + string.digits + "!#$%&*?@"),
            ]
        )

    def pin(self) -> str:
        return self.digits(self.r.choice([4, 4, 6]))

    # ordinary values

    def word(self) -> str:
        return self.r.choice(WORDS)

    def common(self) -> str:
        draw = self.r.random()
        return self.nonsense() if draw < 0.04 else self.r.choice(FUNCTION_WORDS if draw < 0.5 else WORDS)

    lowword = word

    def Word(self) -> str:  # noqa: N802
        return self.word().capitalize()

    def adjective(self) -> str:
        return self.r.choice(ADJECTIVES)

    def verb(self) -> str:
        return self.r.choice(VERBS)

    def nonsense(self) -> str:
        return self.invented().lower()

    def title(self) -> str:
        return self.r.choice(TITLES)

    def relative(self) -> str:
        return self.r.choice(RELATIVES)

    def clause(self) -> str:
        word = self.nonsense() if self.r.random() < 0.1 else self.word()
        start = self.r.choice(STARTS)
        return self.r.choice(
            [
                f"{start} {word} is {self.adjective()}",
                f"{start} {word} was not {self.adjective()} in {self.r.choice([self.month(), self.weekday(), self.year(), self.of('city', 0)])}",
                f"we could {self.verb()} {start} {word} at {self.time()}",
                f"I will {self.verb()} {start} {self.adjective()} {word}",
                f"please {self.verb()} {start} {word} and the {self.word()}",
                f"{start} {self.word()} of {start} {word} has {self.number()} {self.word()}s",
                f"they {self.verb()} it on {self.weekday()}",
                " ".join(self.r.choices(WORDS, k=self.r.randint(3, 8))),
            ]
        )

    def Clause(self) -> str:  # noqa: N802
        clause = self.clause()
        return clause[0].upper() + clause[1:]

    def Phrase(self) -> str:  # noqa: N802
        return " ".join(w.capitalize() for w in self.r.choices(WORDS, k=self.r.randint(1, 4)))

    def company(self) -> str:
        name = self.r.choice([self.Word(), self.r.choice(self.pools["domain"]).capitalize(), self.invented()])
        return f"{name} {self.r.choice(['Ltd', 'Inc.', 'GmbH', 'Group', 'Bank', 'Systems', 'Labs', 'Foods', 'Airlines', 'University'])}"

    def city(self) -> str:
        return self.of("city", 0.1)

    def weekday(self) -> str:
        return self.r.choice(WEEKDAYS)

    def month(self) -> str:
        return self.r.choice(MONTHS)

    def year(self) -> str:
        return str(self.r.randint(1950, 2029))

    def time(self) -> str:
        hour, minute = self.r.randint(0, 23), self.r.randint(0, 59)
        return self.r.choice(
            [f"{hour:02}:{minute:02}", f"{hour % 12 + 1} {self.r.choice(['am', 'pm'])}", f"{hour}:{minute:02}"]
        )

    def number(self) -> str:
        return str(self.r.choice([self.r.randint(0, 9), self.r.randint(10, 99), self.r.randint(100, 9999)]))

    def longnumber(self) -> str:
        return self.digits(self.r.randint(4, 8))

    def price(self) -> str:
        amount = f"{self.r.randint(1, 5000)}.{self.r.randint(0, 99):02}"
        return self.r.choice([f"${amount}", f"€{amount}", f"{amount} EUR", f"£{self.r.randint(1, 900)}", amount])

    def tracking(self) -> str:
        return f"1Z{self.token(8, string.ascii_uppercase + string.digits)}"

    def flight(self) -> str:
        return f"{self.r.choice(['BA', 'LH', 'AF', 'UA', 'KL'])}{self.r.choice(['', ' '])}{self.r.randint(10, 9999)}"

    def version(self) -> str:
        return f"{self.r.randint(0, 12)}.{self.r.randint(0, 30)}.{self.r.randint(0, 9)}"

    def commit(self) -> str:
        return self.token(7, "0123456789abcdef")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--held-out", action="store_true")
    args = parser.parse_args()
    writer = Writer(args.seed, args.held_out)
    for _ in range(args.count):
        text, spans = writer.text()
        for start, end, kind in reversed(spans):
            text = f"{text[:start]}[{kind} {text[start:end]}]{text[end:]}"
        print(f"{text}\n{'-' * 20}")


if __name__ == "__main__":
    main()
