"""The vocabulary of the generated problems: who, what, where, and how a number of things grows, shrinks or repeats.

A scene gives several wordings for each part; `problems` chooses one of each. `{name}` and `{friend}` are people,
`{noun}` is the plural of the thing, `{n}` the number of the step, `{n}` and `{m}` the two numbers of a grouping.
"""

from dataclasses import dataclass

NAMES = tuple(
    "Ali Amy Ana Ben Carl Chen Dana Ella Emma Eva Finn Grace Hana Ivan Jack Jane Jim Joe Julia Kate Kim Leo Lily "  # noqa: SIM905
    "Lucy Maria Mark Mia Mike Nina Noah Olga Omar Paul Peter Rosa Ruth Sam Sara Tim Tom Tina Wei Zoe".split()
)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Interchangeable wordings for one kind of everyday situation."""

    nouns: tuple[str, ...]
    openings: tuple[str, ...]
    gains: tuple[str, ...]
    losses: tuple[str, ...]
    groupings: tuple[str, ...]
    questions: tuple[str, ...]


KITCHEN = Scene(
    nouns=("cookies", "muffins", "pancakes", "buns", "pies"),
    openings=(
        "{name} bakes {n} {noun}.",
        "There are {n} {noun} on the plate.",
        "{name} puts {n} {noun} on the table.",
        "{name} has {n} {noun} for the party.",
    ),
    gains=(
        "Then {name} bakes {n} more.",
        "{friend} brings {n} more.",
        "{name} adds {n} more from the oven.",
        "A neighbour leaves another {n} {noun}.",
    ),
    losses=(
        "{friend} eats {n} of them.",
        "{name} burns {n} {noun} and throws them out.",
        "The guests eat {n} {noun}.",
        "{name} sends {n} {noun} to {friend}.",
    ),
    groupings=(
        "{name} bakes {n} trays of {m} {noun} each.",
        "{name} fills {n} plates with {m} {noun} each.",
        "There are {n} boxes with {m} {noun} in each box.",
    ),
    questions=(
        "How many {noun} are there now?",
        "What is the number of {noun} now?",
        "How many {noun} are on offer in the end?",
    ),
)

ORCHARD = Scene(
    nouns=("apples", "pears", "plums", "peaches", "lemons"),
    openings=(
        "{name} picks {n} {noun}.",
        "{name} has a basket with {n} {noun}.",
        "There are {n} {noun} in the basket.",
        "{name} finds {n} {noun} under the tree.",
    ),
    gains=(
        "{name} picks {n} more.",
        "{friend} puts {n} more into the basket.",
        "{name} finds another {n} {noun} in the grass.",
        "Later {friend} hands over {n} more {noun}.",
    ),
    losses=(
        "{name} eats {n} of them.",
        "{n} of the {noun} turn out to be bad.",
        "{name} gives {n} {noun} to {friend}.",
        "A goat steals {n} {noun}.",
    ),
    groupings=(
        "{name} fills {n} baskets with {m} {noun} each.",
        "{name} picks {m} {noun} from each of {n} trees.",
        "{name} carries {n} bags, and each bag holds {m} {noun}.",
    ),
    questions=(
        "How many {noun} does {name} have now?",
        "How many good {noun} does {name} have?",
        "How many {noun} can {name} take home?",
    ),
)

SCHOOL = Scene(
    nouns=("pencils", "pens", "books", "notebooks", "crayons"),
    openings=(
        "{name} has {n} {noun}.",
        "There are {n} {noun} in the school bag.",
        "{name} starts the week with {n} {noun}.",
        "On Monday {name} counts {n} {noun} on the desk.",
    ),
    gains=(
        "{name} buys {n} more.",
        "The teacher gives {name} {n} more.",
        "{friend} lends {name} {n} {noun}.",
        "{name} gets another {n} {noun} as a prize.",
    ),
    losses=(
        "{name} loses {n} of them.",
        "{name} gives {n} {noun} to {friend}.",
        "{friend} borrows {n} {noun}.",
        "{name} leaves {n} {noun} at home.",
    ),
    groupings=(
        "{name} buys {n} packs of {m} {noun}.",
        "{n} students bring {m} {noun} each.",
        "There are {n} shelves with {m} {noun} on each shelf.",
    ),
    questions=(
        "How many {noun} are there now?",
        "How many {noun} are in the classroom?",
        "What is the number of {noun} after that?",
    ),
)

TOYS = Scene(
    nouns=("marbles", "toy cars", "stickers", "balloons", "cards"),
    openings=(
        "{name} owns {n} {noun}.",
        "{name} has {n} {noun} in a box.",
        "{name} got {n} {noun} for a birthday.",
        "{name} keeps {n} {noun} under the bed.",
    ),
    gains=(
        "{name} wins {n} more.",
        "{name} gets {n} more from {friend}.",
        "{friend} adds {n} {noun} to the box.",
        "{name} trades a hat for another {n} {noun}.",
    ),
    losses=(
        "{name} loses {n} {noun} in a game.",
        "{name} gives {friend} {n} {noun}.",
        "{n} of the {noun} break.",
        "{name} sells {n} {noun}.",
    ),
    groupings=(
        "{name} opens {n} packets with {m} {noun} in each.",
        "{name} gets {m} {noun} from each of {n} friends.",
        "{name} sorts {noun} into {n} piles of {m}.",
    ),
    questions=(
        "How many {noun} does {name} have now?",
        "How many {noun} are in the collection?",
        "How many {noun} can {name} play with now?",
    ),
)

TRAVEL = Scene(
    nouns=("people", "children", "passengers", "tourists", "students"),
    openings=(
        "{n} {noun} sit on a bus.",
        "A train leaves with {n} {noun}.",
        "There are {n} {noun} on the boat.",
        "{n} {noun} wait at the station.",
    ),
    gains=(
        "{n} more get on.",
        "At the next stop another {n} {noun} join.",
        "{n} more {noun} come with {name}.",
        "A taxi brings {n} more.",
    ),
    losses=(
        "{n} of them leave.",
        "At the next stop {n} {noun} get off.",
        "{n} {noun} go home with {name}.",
        "{n} {noun} walk away.",
    ),
    groupings=(
        "{n} cars arrive with {m} {noun} in each car.",
        "There are {n} rows with {m} {noun} in each row.",
        "{name} leads {n} groups of {m} {noun}.",
    ),
    questions=(
        "How many {noun} are there now?",
        "How many {noun} are in the group at the end?",
        "How many {noun} does {name} count now?",
    ),
)

SHOP = Scene(
    nouns=("hats", "lamps", "shirts", "cups", "chairs"),
    openings=(
        "A shop has {n} {noun}.",
        "{name} keeps {n} {noun} in the shop.",
        "In the morning there are {n} {noun} on the shelf.",
        "{name} orders {n} {noun} for the store.",
    ),
    gains=(
        "A truck delivers {n} more.",
        "{name} makes {n} more.",
        "A customer returns {n} {noun}.",
        "{friend} unpacks another {n} {noun}.",
    ),
    losses=(
        "The shop sells {n} of them.",
        "{friend} buys {n} {noun}.",
        "{n} {noun} are damaged and sent back.",
        "By noon {n} {noun} are gone.",
    ),
    groupings=(
        "{name} unpacks {n} crates with {m} {noun} each.",
        "A shop shows {n} rows of {m} {noun}.",
        "{n} customers return {m} {noun} each.",
    ),
    questions=(
        "How many {noun} does the shop have now?",
        "How many {noun} are in stock?",
        "How many {noun} can be sold tomorrow?",
    ),
)

FARM = Scene(
    nouns=("cows", "hens", "sheep", "ducks", "goats"),
    openings=(
        "A farmer has {n} {noun}.",
        "There are {n} {noun} in the field.",
        "{name} looks after {n} {noun}.",
        "{n} {noun} stand near the barn.",
    ),
    gains=(
        "{n} more come.",
        "{name} buys {n} more at the market.",
        "{n} {noun} are born in spring.",
        "{friend} brings another {n} {noun}.",
    ),
    losses=(
        "{n} of them run away.",
        "{name} sells {n} {noun}.",
        "{n} {noun} go into the barn.",
        "{friend} takes {n} {noun} away.",
    ),
    groupings=(
        "{n} farmers bring {m} {noun} each.",
        "There are {n} pens with {m} {noun} in each pen.",
        "{name} counts {m} {noun} in each of {n} fields.",
    ),
    questions=(
        "How many {noun} are outside now?",
        "How many {noun} are there in the end?",
        "How many {noun} can {name} see now?",
    ),
)

MONEY = Scene(
    nouns=("dollars",),
    openings=(
        "{name} has {n} dollars.",
        "{name} saves {n} dollars.",
        "There are {n} dollars in the piggy bank.",
        "{name} brings {n} dollars to the fair.",
    ),
    gains=(
        "{name} earns {n} more.",
        "Grandma gives {name} {n} dollars.",
        "{friend} pays back {n} dollars.",
        "{name} finds another {n} dollars in a coat.",
    ),
    losses=(
        "{name} spends {n} dollars on lunch.",
        "{name} lends {friend} {n} dollars.",
        "A ticket costs {name} {n} dollars.",
        "{name} pays {n} dollars for a toy.",
    ),
    groupings=(
        "{name} works {n} hours for {m} dollars an hour.",
        "{name} sells {n} drawings for {m} dollars each.",
        "{name} gets {m} dollars from each of {n} aunts.",
    ),
    questions=(
        "How much money does {name} have now?",
        "How many dollars does {name} have now?",
        "How many dollars are in the purse of {name} now?",
    ),
)

SCENES = (KITCHEN, ORCHARD, SCHOOL, TOYS, TRAVEL, SHOP, FARM, MONEY)
