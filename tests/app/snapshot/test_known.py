"""A reader with a cache gets the same as a reader without one, and the same values if nothing changed."""

from hypothesis import given
from hypothesis import strategies as st

from rackloom.app.snapshot.cache import ReadCache

OBJECTS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)).map(
    lambda versions: [
        {"metadata": {"uid": uid, "resourceVersion": str(version)}, "spec": version}
        for uid, version in versions.items()
    ]
)


def decoded(obj):
    return (obj["metadata"]["uid"], obj["spec"])


@given(st.lists(OBJECTS, max_size=5))
def test_objects_are_read_again_when_their_version_is_another(lists):
    known = ReadCache()
    for objects in lists:
        assert known.each(decoded, objects) == [decoded(obj) for obj in objects]


def test_an_object_of_the_same_version_is_the_same_value():
    known = ReadCache()
    obj = {"metadata": {"uid": "a", "resourceVersion": "1"}, "spec": 1}
    (first,), (again,) = known.each(decoded, [obj]), known.each(decoded, [{**obj}])
    assert first is again


def test_an_answer_is_its_askers_own():
    known = ReadCache()
    obj = {"metadata": {"uid": "a", "resourceVersion": "1"}, "spec": 1}
    for _ in range(3):
        answer = known.each(decoded, [obj])
        assert len(answer) == 1
        answer.clear()


def test_objects_without_a_version_are_read_every_time():
    known = ReadCache()
    assert known.each(decoded, [{"metadata": {"uid": "a"}, "spec": 1}]) == [("a", 1)]
    assert known.each(decoded, [{"metadata": {"uid": "a"}, "spec": 2}]) == [("a", 2)]


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)), max_size=5))
def test_what_is_told_otherwise_is_made_again(stories):
    known, made = ReadCache(), []

    def make(reported):
        made.append(reported)
        return [reported]

    before = {}
    for reported in stories:
        made.clear()
        assert known.again(reported, make) == [[value] for value in reported.values()]
        assert made == [value for name, value in reported.items() if before.get(name) != value]
        before = reported


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz")), max_size=6))
def test_what_has_the_same_digest_is_not_read_again(story):
    known, read = ReadCache(), []

    def reading(source, names):
        read.append(list(names))
        return {name: [source[name]] for name in names}

    before, values = {}, {}
    for digests in story:
        read.clear()
        found = known.unless(digests, reading, digests)
        assert found == {name: [digest] for name, digest in digests.items()}
        other = [name for name, digest in digests.items() if before.get(name) != digest]
        assert read == ([other] if other else [])
        assert all(found[name] is values[name] for name in digests.keys() - set(other))
        before, values = digests, found
