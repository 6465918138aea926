"""The bill of materials of an image: each Debian package and each wheel in it, as CycloneDX."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

if TYPE_CHECKING:
    from collections.abc import Mapping

LICENSES = LicenseFactory()
LONGEST = 100
"""Characters of a licence's name: some wheels put the whole text there."""
DISTRO = "debian-12"
"""As scanners name the suite of contents.toml."""


def bill(image: Mapping[str, str], inputs: Mapping[str, Any], layers: Mapping[str, str], seconds: int) -> str:
    """Return the bill as JSON; the same input gives the same bytes.

    Args:
        image: ``name``, ``version``, ``license``, ``kind`` (a key of ``inputs["wheels"]``).
        inputs: As ``inside.py`` writes them.
        layers: Of each layer the SHA-256 of its tar file, in hex.
        seconds: Since 1970: when it was made.
    """
    architecture = inputs["architecture"]
    subject = Component(
        type=ComponentType.CONTAINER,
        name=image["name"],
        version=image["version"],
        bom_ref=f"{image['name']}@{image['version']}-{architecture}",
        licenses=[LICENSES.make_from_string(image["license"])],
        properties=[
            Property(name="dev.carpool.architecture", value=architecture),
            *(Property(name=f"dev.carpool.layer.{name}", value=f"sha256:{digest}") for name, digest in layers.items()),
        ],
    )
    packages = [_debian(each) for each in inputs["debian"]]
    wheels = [_wheel(each) for each in inputs["wheels"][image["kind"]]]
    bom = Bom(components=[*packages, *wheels], serial_number=uuid.uuid5(uuid.NAMESPACE_OID, " ".join(layers.values())))
    bom.metadata.component = subject
    bom.metadata.timestamp = datetime.fromtimestamp(seconds, UTC)
    bom.register_dependency(subject, bom.components)
    return JsonV1Dot6(bom).output_as_string(indent=1) + "\n"


def _debian(package: Mapping[str, str]) -> Component:
    # Advisories are about source packages: `upstream`.
    qualifiers = {"arch": package["architecture"], "distro": DISTRO, "upstream": package["source"]}
    return Component(
        type=ComponentType.LIBRARY,
        name=package["name"],
        version=package["version"],
        bom_ref=f"deb:{package['name']}",
        purl=PackageURL("deb", "debian", package["name"], package["version"], qualifiers),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=package["sha256"])],
        properties=[Property(name="dev.carpool.debian.source", value=package["source"])],
    )


def _wheel(wheel: Mapping[str, str]) -> Component:
    stated = wheel["license"].strip().splitlines()
    named = [LICENSES.make_from_string(stated[0])] if stated and len(stated[0]) <= LONGEST else []
    return Component(
        type=ComponentType.LIBRARY,
        name=wheel["name"],
        version=wheel["version"],
        bom_ref=f"wheel:{wheel['name']}",
        purl=PackageURL("pypi", None, wheel["name"].lower().replace("_", "-"), wheel["version"]),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=wheel["sha256"])],
        licenses=named,
        properties=[Property(name="dev.carpool.wheel", value=wheel["file"])],
    )
