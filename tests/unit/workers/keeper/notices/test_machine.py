import pytest

from workers.keeper.notices import recognised


@pytest.mark.parametrize(
    ("dmi", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2", "product_name": "g5.2xlarge"}, "aws"),
        ({"sys_vendor": "Xen", "product_version": "4.11.amazon"}, "aws"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gcp"),
        (
            {
                "sys_vendor": "Microsoft Corporation",
                "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77",
            },
            "azure",
        ),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}, "none"),
        ({"sys_vendor": "QEMU"}, "none"),
        ({}, "none"),
    ],
)
def test_the_firmware_says_which_cloud_it_is(dmi: dict[str, str], cloud: str) -> None:
    """Hyper-V is not Azure, and an old instance of Amazon calls itself Xen."""
    assert recognised(dmi) == cloud
