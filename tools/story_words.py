"""Words the story grammar draws from: who, what, where, and names.

Owns only the lists. `they` is for words of either gender; the grammar settles it per tale.
"""

# ruff: noqa: SIM905 -- lists of words read better as text

from __future__ import annotations

ANIMALS = """fox bear wolf hare hedgehog owl mouse cat dog raven crow goose duck hen rooster goat donkey horse pony cow
sheep lamb squirrel badger otter beaver frog toad turtle tortoise snail spider ant bee beetle cricket butterfly moth
sparrow robin swallow stork crane heron eagle hawk falcon pigeon dove magpie parrot peacock swan seal whale dolphin
crab octopus fish trout salmon lizard snake crocodile monkey ape elephant lion tiger leopard camel giraffe zebra
kangaroo penguin rabbit mole rat bat deer stag moose reindeer weasel ferret hamster kitten puppy foal calf piglet pig
duckling chick caterpillar firefly dragonfly worm lynx jackal hyena rhino hippo panda koala sloth llama yak ostrich
walrus narwhal gecko chameleon newt salamander cuckoo woodpecker nightingale finch gull pelican""".split()

PEOPLE_SHE = """girl princess queen witch woman shepherdess goose-girl grandmother fairy mermaid milkmaid dairymaid
seamstress nun baroness duchess aunt sister mother daughter widow washerwoman""".split()

PEOPLE_HE = """boy prince king wizard man shepherd fisherman grandfather woodcutter miller hunter monk baron duke uncle
brother father son knight page blacksmith""".split()

PEOPLE_THEY = """child farmer baker tailor weaver sailor gardener teacher doctor painter singer musician fiddler potter
cobbler clockmaker thief beggar peddler merchant traveler student baby scholar juggler dancer acrobat clown captain
pirate soldier cook librarian lamplighter beekeeper carpenter mason tinker poet pilot astronaut inventor detective
postman ferryman innkeeper bellringer chimney-sweep stargazer wanderer judge mayor neighbor""".split()

CREATURES = """dragon giant ogre troll goblin elf gnome dwarf unicorn griffin phoenix ghost imp pixie robot scarecrow
snowman doll puppet cloud star moonbeam shadow statue monster dinosaur centaur sprite kobold toy-soldier teddy-bear
pumpkin mushroom tree river wind raindrop snowflake sunflower rose thistle pebble teapot clock broom""".split()

STRONG = """dragon giant ogre troll goblin wolf bear lion tiger witch wizard robber king queen baron eagle crocodile
pirate captain sphinx serpent bull boar knight hunter""".split()

RULERS = """king queen prince princess duke duchess baron baroness emperor empress sultan wizard witch mayor giant
lion judge captain dragon""".split()

WISE = """woman man hermit monk wizard witch grandmother grandfather owl turtle shepherd miller farmer gardener fairy
fisherman weaver baker captain teacher beekeeper potter raven""".split()

THINGS = """lantern key ring bell drum flute fiddle violin trumpet harp horn whistle crown mirror comb brush needle
thimble button ribbon hat cap cloak coat scarf glove shoe boot slipper belt purse bag sack basket box chest casket jar
jug pot kettle pan cup bowl spoon knife fork plate bottle candle lamp torch rope net hook anchor compass map book letter
scroll quill pen ink-pot feather stone pebble pearl diamond ruby emerald jewel necklace bracelet brooch coin penny egg
apple pear plum nut acorn seed leaf flower rose lily tulip daisy clover mushroom pumpkin turnip carrot cake pie loaf
biscuit pancake hammer axe spade saw nail wheel wagon cart sled boat kite ball top doll puppet teddy-bear rocking-horse
clock watch hourglass umbrella walking-stick staff wand sword shield helmet arrow bow spinning-wheel loom blanket pillow
quilt carpet broom bucket ladder chair stool table teapot telescope magnet music-box snow-globe paintbrush crystal
shell starfish bone horseshoe lock chain mask fan cage nest icicle snowflake marble bicycle balloon camera radio
train engine robot rocket pencil notebook backpack guitar piano lollipop cookie sandwich pizza spyglass trunk tent
flag banner kerchief handkerchief apron stocking mitten sock bonnet whip saddle bridle oar paddle barrel tub""".split()

MAGIC_THINGS = """pot kettle mill pan jug jar spinning-wheel loom oven barrel bowl teapot table sack basket chest
spoon bottle box bucket flute bell""".split()

COLORS = frozenset({"red", "grey", "white", "black", "brown"})

THING_ADJECTIVES = """silver golden old little small tiny wooden blue red green white black copper glass iron brass
shining strange rusty round beautiful painted crooked plain broken carved yellow magic wonderful dusty bright heavy
velvet crystal purple striped simple worn precious curious""".split()

HERO_ADJECTIVES = """little young old brave shy clever poor lonely kind gentle small lazy merry curious foolish
grumpy hungry sleepy tiny proud quiet tall thin fat red grey white black brown honest cheerful timid sad happy
wise stubborn silly ragged good-natured absent-minded""".split()

# place: the preposition that goes with it
PLACES = {
    "in": """forest wood valley village town city castle palace cave garden orchard meadow field kingdom cottage tower
marsh swamp desert jungle barn hut attic cellar kitchen library harbor canyon ruin vineyard greenhouse museum school
graveyard churchyard wilderness monastery market-town cornfield birch-wood hollow glen dell thicket windmill
watermill lighthouse treehouse stable workshop bakery bookshop toyshop park zoo""".split(),
    "on": """hill mountain island moor farm cliff ship plain heath glacier hillside mountainside planet moon rooftop
peninsula houseboat""".split(),
    "by": """sea lake river pond brook stream mill well bridge waterfall fountain crossroads spring canal lagoon fjord
harbor railway""".split(),
    "at": "inn market edge-of-the-world north-pole crossroads mill railway-station mountain-pass ferry".split(),
}

PLACE_ADJECTIVES = """deep dark quiet old great green little wide lonely snowy misty far-off sunny enchanted forgotten
cold windy small narrow rocky wild silent""".split()

NAMES_SHE = """Mira Anna Ella Lily Rose Greta Ingrid Freya Nora Clara Elsa Maya Zoe Ruth Hannah Sofia Emma Olivia Lucy
Alice Daisy Poppy Ivy Hazel Willow Marta Petra Tilda Wilma Agnes Martha Matilda Bella Stella Luna Leila Amina Yuki Mei
Priya Anya Katya Olga Vera Nina Sonja Astrid Linnea Maria Rosa Carmen Lucia Chiara Giulia Amelie Colette Margot Juliet
Beatrice Edith Mabel Molly Polly Sally Kate Jane Mary Sarah Rachel Rebecca Esther Judith Dora Flora Cora Thea Lina Tina
Gerda Heidi Liesel Gretel Marlene Isolde Sigrid Helga Brigid Maeve Fiona Nuala Aisha Zahra Fatima Nadia Salma Ines Pia
Amy Ava Mia Chloe Grace Ruby Charlotte Sophie Lena Johanna Emily Elizabeth Victoria Julia Laura Eva Iris Violet Pearl
""".split()

NAMES_HE = """Tom Jack Hans Peter Paul Otto Karl Emil Oskar Felix Max Leo Ben Sam Tim Jim Will Henry Edward George James
John David Daniel Jonas Lukas Noah Elias Anton Bruno Hugo Arthur Edgar Oliver Oscar Simon Martin Thomas Robert Richard
William Frederick Conrad Casper Jasper Rufus Silas Milo Finn Liam Owen Rory Kieran Ivan Boris Dimitri Sasha Pavel Marek
Jan Piotr Omar Ali Hassan Karim Yusuf Ravi Arjun Kofi Kwame Chidi Kenji Hiro Taro Wei Jun Carlos Diego Pablo Mateo Luca
Marco Paolo Giorgio Nils Lars Erik Sven Olaf Gustav Axel Bjorn Leif Knut Niko Alexander Sebastian Nathan Adam
Alan Alfred Albert Walter Ernest Harold Herbert Barnaby Toby Harry Charlie Archie Teddy Ned Rob Dick Tobias Jacob
Joseph Samuel
""".split()

NAME_STARTS = """b br c ch d dr f fl g gr h j k kr l m n p pr qu r s sh st t th tr v w y z bl cl gl pl sl sn sp tw
""".split()
NAME_VOWELS = "a a e e i i o o u u ee oo ai ia io ea ou".split()
NAME_MIDDLES = "b d f g k l ll m mm n nn p r rr s ss t tt v z nd rl lm rn st x nk mb ld".split()
NAME_ENDS = (
    "a o i y el in an on us as is e ek ik ok le ra la na wyn bel dor mir rin lin ka ko bo by n m r l th x".split()
)

CREATURES = [noun.replace("-", " ") for noun in CREATURES]
THINGS = [noun.replace("-", " ") for noun in THINGS]
PLACES = {preposition: [noun.replace("-", " ") for noun in nouns] for preposition, nouns in PLACES.items()}
