"""Four things to ask a small model: a question, a text to summarise with quotes, a text to change, a text to copy."""

LIGHTHOUSE = (
    "The lighthouse was built in 1874 on a small island two miles from the coast. For more than a hundred years a "
    "keeper lived there with his family. The keeper lit the lamp every evening at sunset and put it out at sunrise. In "
    "winter the sea was often so rough that no boat could reach the island for weeks, and the family had to live on "
    "dried fish, potatoes and the milk of two goats. In 1983 the lamp was replaced by an automatic light, and the last "
    "keeper moved to the town. Today the house of the keeper is a small museum. Visitors can see the old lamp, the "
    "logbooks of the keepers and the boat that brought their supplies. The museum is open from May to September."
)
CAT = (
    "The cat sat by the window and watched the rain. Every morning the cat walked along the wall to the old garden, "
    "where it slept under the apple tree until noon. In the afternoon the children came home from school, and the cat "
    "followed them into the kitchen. There it got a little milk and a piece of fish. When the evening came, the cat "
    "went back to its place by the window and waited for the moon."
)
ANNA = (
    "Anna lives in a small house near the river. Every morning Anna takes her bicycle and rides to the market, where "
    "she sells bread, honey and apples from her garden. At noon the market closes, and Anna drinks a cup of coffee "
    "with the fishermen in the harbour. In the afternoon she reads the newspaper under the old apple tree. In the "
    "evening Anna cooks a soup with vegetables, feeds the two cats and calls her sister in the city. Before she goes "
    "to sleep, she opens the window and listens to the water."
)
WORKLOADS = {
    "chat": "Why do the leaves of many trees turn red and yellow in autumn? Explain it to a child.",
    "summarise": "Summarise the following text. Quote its most important sentences word for word.\n\n" + LIGHTHOUSE,
    "edit": 'Rewrite this text. Change the name "Anna" to "Maria" and nothing else.\n\n' + ANNA,
    "copy": "Repeat the following text word for word.\n\n" + CAT,
}
