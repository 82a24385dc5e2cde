"""The 512 words of the embedded models, in the order of ids; `embedded` names the ranges."""

MARKERS = "<pad> <s> <end> <unk> . , fact is ask list answer".split()

# Words of keys: colours and materials, numbers, qualities, animals.
KEYS = """
amber azure beige black blue bronze brass copper coral crimson cyan gold gray green indigo ivory
jade lemon lilac lime maroon mint navy olive orange pearl pink plum purple red ruby silver
one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty
big bold brave bright calm clever cold cool deep dry fast fine fresh gentle grand happy
ant ape badger bat bear bee bird bison boar bull camel cat cobra cow crab crane
crow deer dog dolphin dove duck eagle eel elk falcon ferret finch fox frog goat goose
gull hare hawk hen heron horse hound ibis koala lark lion lizard llama lynx mole moose
mouse mule newt otter owl ox panda parrot pig pigeon puma puppy rabbit raven robin salmon
""".split()

# Words of values: plants, places, foods, tools, furniture.
VALUES = """
acorn apple ash aspen bamboo bark bean beet berry birch bloom branch bush cactus cedar cherry
clover corn daisy elm fern fig fir flax grape grass hazel holly iris ivy juniper kale
bay beach bridge brook canyon cape cave cliff coast creek delta desert dune field forest garden
glacier harbor hill island lagoon lake marsh meadow mesa moor mountain ocean pond reef river shore
bread butter cake cheese cocoa coffee cream honey jam milk pasta nut oak oil pepper stone
rice salt sauce soup spice sugar syrup tea toast wheat yeast anchor anvil axe basket bell
bench blanket book bottle bowl box brick broom brush bucket button candle canvas carpet chain chair
clock coin comb compass cup curtain desk door drum engine fan flute fork glass glove hammer
""".split()

# Words of the text around the facts.
FILLER = """
a about after again against ago all almost alone along already also always among an and another
any anyone anything are around as at away back bad be because been before began begin behind
being below beside best better between beyond both bring build but by call came can care carry
catch child clear close come common could cut day days did do does done down draw drive each
early easy eat either else end enough even ever every face fall far feel feet few find first
follow food foot for found free friend from front full gave get girl give go good great group
grow half hand hard has have he head hear heart help her here high him his hold home hope hour
house how however if in inside into it its just keep kind king knew know land large last learn
leave left less let letter life like little live long look lost love made make man many may me
mean men might mind miss more morning most move much must my name near never new next night no
none nor not nothing now of off often old on once only open or other our out over own page part
past people plan play point put quite right road said same saw say see seem sent she should
show side since small so some soon stand start still stop such sure take talk tell than that
the their them then there these
""".split()

VOCABULARY = (*MARKERS, *KEYS, *VALUES, *FILLER)
