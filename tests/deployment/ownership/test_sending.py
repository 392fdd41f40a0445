from deployment.ownership.messages import Append, Bring
from deployment.ownership.sending import REPEAT_SECONDS, Links
from deployment.ownership.words import NEVER, NOTHING, Member, SessionKey

KEY = SessionKey("a" * 64, "s")
JOINER, SOURCE = Member("one", "1" * 32), Member("two", "2" * 32)


def test_store_that_fetches_an_image_is_asked_again_every_second_and_is_not_silent_meanwhile():
    links = Links()
    bring = Bring(KEY, NEVER, NOTHING, SOURCE)
    links.ask(JOINER, bring, 0.0)
    asked = [at for at in range(1, 31) if links.repeat(float(at)) and not links.silent(float(at))]
    assert asked == list(range(1, 31)) and REPEAT_SECONDS == 1.0
    assert links.silent(61.0) == [JOINER]


def test_store_that_does_not_answer_a_record_is_silent_after_five_seconds():
    links = Links()
    links.ask(JOINER, Append(KEY, NEVER, NOTHING, ()), 0.0)
    assert not links.silent(5.0) and links.silent(5.1) == [JOINER]
