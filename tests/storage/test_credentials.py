from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import OptionError
from penstock.storage.credentials import aws_settings
from penstock.storage.options import StoreOptions


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = DEFAULT1\naws_secret_access_key = s1\n"
        "[work]\naws_access_key_id = WORK2222\naws_secret_access_key = s2%x\n"
        "aws_session_token = t2\n"
    )
    (tmp_path / "config").write_text(
        "[default]\nregion = eu-west-1\n"
        "[profile work]\nregion = us-west-2\nendpoint_url = http://store:9000\n"
        "[profile roles]\nrole_arn = arn:x\n"
    )
    return {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
    }


def test_the_default_profile_is_found(home: dict[str, str]) -> None:
    found = aws_settings(StoreOptions(), home)
    assert (found.access_key, found.secret_key, found.region) == ("DEFAULT1", "s1", "eu-west-1")
    assert found.kind == "the access key DEFA… of profile 'default'"


@pytest.mark.parametrize("by_option", [True, False])
def test_a_profile_is_chosen_by_option_or_environment(
    home: dict[str, str], by_option: bool
) -> None:
    options = StoreOptions(profile="work") if by_option else StoreOptions()
    environment = home if by_option else home | {"AWS_PROFILE": "work"}
    found = aws_settings(options, environment)
    assert (found.access_key, found.secret_key, found.session_token) == ("WORK2222", "s2%x", "t2")
    assert (found.region, found.endpoint) == ("us-west-2", "http://store:9000")


def test_environment_goes_before_the_default_profile(home: dict[str, str]) -> None:
    environment = home | {
        "AWS_ACCESS_KEY_ID": "ENV33333",
        "AWS_SECRET_ACCESS_KEY": "s3",
        "AWS_REGION": "ap-south-1",
        "AWS_ENDPOINT_URL": "http://a",
        "AWS_ENDPOINT_URL_S3": "http://b",
    }
    found = aws_settings(StoreOptions(), environment)
    assert (found.access_key, found.region, found.endpoint) == (
        "ENV33333",
        "ap-south-1",
        "http://b",
    )
    assert "environment" in found.kind


def test_a_profile_that_was_asked_for_goes_before_the_environment(home: dict[str, str]) -> None:
    environment = home | {"AWS_ACCESS_KEY_ID": "ENV33333", "AWS_SECRET_ACCESS_KEY": "s3"}
    assert aws_settings(StoreOptions(profile="work"), environment).access_key == "WORK2222"


def test_options_go_before_everything(home: dict[str, str]) -> None:
    options = StoreOptions(access_key="OPT44444", secret_key="s4", endpoint="https://mine")
    found = aws_settings(options, home | {"AWS_ACCESS_KEY_ID": "ENV33333"})
    assert (found.access_key, found.endpoint) == ("OPT44444", "https://mine")


def test_nothing_found_is_left_to_the_instance(tmp_path: Path) -> None:
    nowhere = {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "no"),
        "AWS_CONFIG_FILE": str(tmp_path / "no"),
    }
    found = aws_settings(StoreOptions(), nowhere)
    assert (found.access_key, found.kind) == (None, "the instance's own role")
    identity = nowhere | {"AWS_WEB_IDENTITY_TOKEN_FILE": "/x"}
    assert aws_settings(StoreOptions(), identity).kind == "the web identity token"


def test_a_missing_profile_is_an_error_with_the_files(home: dict[str, str]) -> None:
    with pytest.raises(OptionError, match=r"no profile 'wrk' in .*credentials"):
        aws_settings(StoreOptions(profile="wrk"), home)


def test_a_profile_by_role_says_what_to_run(home: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="export-credentials --profile roles"):
        aws_settings(StoreOptions(profile="roles"), home)


def test_no_secret_is_shown(home: dict[str, str]) -> None:
    found = aws_settings(StoreOptions(profile="work"), home)
    assert "s2" not in repr(found)
    assert "t2" not in repr(found)
