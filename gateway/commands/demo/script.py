"""The demo's script: one long document shared by all conversations, and the questions of two conversations."""

from __future__ import annotations

from collections.abc import Sequence

DOCUMENT = """\
HANDBOOK OF THE HARBOUR LIGHT STATION

1. The tower. The light station stands on the eastern mole, forty-one metres above mean high water. It was built of grey \
granite between 1868 and 1871 and has 212 steps from the oil cellar to the lantern gallery. The walls are two metres thick at \
the base and seventy centimetres at the top. The tower leans eleven centimetres to the south-west, measured every spring with \
the plumb line that hangs in the stairwell. Nobody may hang anything else in the stairwell.

2. The lamp. The lens is a first-order Fresnel lens with eight panels, floating on a bath of mercury. It turns once in forty \
seconds and so shows one white flash every five seconds. The range in clear weather is twenty-three nautical miles. The lamp \
itself is a metal halide lamp of one thousand watts; a second one stands beside it on a changer and is swung into place within \
three seconds when the first one fails. The keeper on duty writes each change into the red book, with the hour and the hours \
that the old lamp had burned.

3. Power. The station is fed by a cable from the town. When the town's power fails, a diesel generator starts by itself; it \
needs nine seconds, during which a bank of batteries carries the lamp. The tank holds six hundred litres, which is enough for \
four days. The generator is run for one hour on the first Monday of each month, in the morning, and the fuel is measured with \
the brass rod before and after. Below two hundred litres the keeper orders fuel from the harbour office.

4. Fog. When the visibility is below two miles, the fog signal is switched on. It sounds two blasts of two seconds every \
thirty seconds. The keeper judges visibility by the three marks: the church of Saint Anne at one mile, the water tower at two \
miles, and the white cliff at five. If the water tower cannot be seen, there is fog. The fog signal frightens the gulls, who \
return after about ten minutes, and the keeper's dog, who does not.

5. Watches. There are three keepers: Marit Olsen, Joseph Adeyemi and Clara Finch. The watches change at six in the morning, at \
two in the afternoon and at ten in the evening. The keeper who goes off duty tells the next one the state of the lamp, the \
fuel, the weather and the kettle, in this order. On Sundays the afternoon watch is shortened by one hour and the harbour \
master sits in. A keeper who is ill telephones the harbour office before the watch begins, not after.

6. Visitors. Visitors may climb the tower on Saturdays between ten and four, at most eight at a time, children only with an \
adult. The lantern room itself is closed to them because of the mercury. A ticket costs four crowns, and pays for the paint. \
Visitors who count the steps and arrive at a number other than 212 are asked to count again.

7. The red book and the blue book. The red book is for the lamp, the generator and the fog signal. The blue book is for the \
weather, the ships that pass, and birds. Nothing is ever torn out of either. When a book is full it goes to the archive in the \
town hall, where the oldest one begins on the second of March 1871 with the words: light shown first time tonight, wind north, \
cold, all well.

8. Storms. Above force ten no keeper goes out onto the gallery. The shutters on the weather side are closed from the inside, \
the boat is drawn up to the second ring, and the radio is kept on channel sixteen. In the storm of 1911 the sea broke the \
window of the kitchen, which is twenty metres above the water; since then the kitchen window has had a shutter of oak.
"""

SYSTEM = "You are the assistant of the light station. Answer in one short sentence, from this handbook.\n\n" + DOCUMENT

CONVERSATIONS: dict[str, Sequence[str]] = {
    "lamp": (
        "How high above the water is the tower?",
        "How often does the lamp flash?",
        "And what happens when the lamp fails?",
        "Which book is that written into?",
    ),
    "fog": (
        "When is the fog signal switched on?",
        "How does the keeper judge the visibility?",
        "How does the signal sound?",
        "What do the gulls do then?",
    ),
}

# The order of the turns. Not strictly alternating: users do not wait for each other.
ORDER = ("lamp", "fog", "fog", "lamp", "lamp", "fog", "fog", "lamp")

MAX_TOKENS = 24
PRICES = {"input": 0.50, "cached_input": 0.05, "output": 1.50}  # USD per million tokens
