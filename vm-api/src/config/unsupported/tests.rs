use serde::de::DeserializeOwned;
use serde_json::json;

use super::*;
use crate::config::option::Options as _;
use crate::config::{ConsoleConfig, CpusConfig, DiskConfig, MemoryConfig, NetConfig, PayloadConfig, VmConfig};

/// A field is in the table or in the typed configuration, never in both: the table would refuse a supported one.
fn assert_unknown<T: DeserializeOwned>(object: Object) {
    for field in object.fields() {
        let error = serde_json::from_value::<T>(json!({field: null})).err();
        let text = error.map(|error| error.to_string()).unwrap_or_default();
        assert!(text.contains("unknown field"), "{field} is supported now; take it out of this table");
    }
}

#[test]
fn what_is_later_is_not_there() {
    assert_unknown::<VmConfig>(Vm);
    assert_unknown::<CpusConfig>(Cpus);
    assert_unknown::<MemoryConfig>(Memory);
    assert_unknown::<PayloadConfig>(Payload);
    assert_unknown::<ConsoleConfig>(Console);
    assert_unknown::<DiskConfig>(Disk);
}

fn strip(mut value: Value) -> Result<Value, String> {
    Vm.strip(&mut value, "").map(|()| value).map_err(|error| error.to_string())
}

#[test]
fn a_field_at_its_default_is_taken_out() {
    let stripped = strip(json!({
        "cpus": {"boot_vcpus": 2, "max_vcpus": 4, "nested": true, "features": {"amx": false}, "topology": null},
        "platform": {"num_pci_segments": 2, "iommufd": false, "uuid": null},
        "fs": [], "iommu": false, "landlock_rules": null, "memory": null,
    }));
    assert_eq!(stripped, Ok(json!({"cpus": {"boot_vcpus": 2, "max_vcpus": 4}})));
}

#[test]
fn a_field_that_asks_for_something_is_refused_with_its_path() {
    for (value, what) in [
        (json!({"fs": [{"tag": "x"}]}), "fs: shared file systems are not supported yet; leave it out"),
        (
            json!({"cpus": {"nested": false}}),
            "cpus.nested: choosing nested virtualisation is not supported yet; leave it out",
        ),
        (
            json!({"cpus": {"features": {"amx": true}}}),
            "cpus.features.amx: additional CPU features are not supported yet; leave it out",
        ),
        (
            json!({"disks": [{}, {"lock_granularity": "Full"}]}),
            "disks[1].lock_granularity: choosing the granularity of locks is not supported yet; leave it out",
        ),
        (
            json!({"platform": {"num_pci_segments": 97}}),
            "platform.num_pci_segments: additional PCI segments are not supported yet; leave it out",
        ),
        (
            json!({"platform": {"colour": 1}}),
            "platform.colour: unknown field; the API's description lists the known ones",
        ),
        (json!({"platform": 7}), "platform: platform settings are not supported yet; leave it out"),
        (
            json!({"memory": {"hotplug_size": 1}}),
            "memory.hotplug_size: memory hot-plug is not supported yet; leave it out",
        ),
    ] {
        assert_eq!(strip(value), Err(what.to_string()));
    }
}

#[test]
fn the_topology_that_guests_have_anyway_is_accepted() {
    let cpus = |topology: Value| strip(json!({"cpus": {"boot_vcpus": 1, "max_vcpus": 4, "topology": topology}}));
    let own = json!({"threads_per_core": 1, "cores_per_die": 4, "dies_per_package": 1, "packages": 1});
    assert!(cpus(own).is_ok());
    assert!(cpus(json!({})).is_ok());
    for other in
        [json!({"threads_per_core": 2, "cores_per_die": 2}), json!({"packages": 4}), json!("flat"), json!({"x": 1})]
    {
        assert!(cpus(other.clone()).is_err(), "{other}");
    }
}

#[test]
fn what_nobody_knows_is_left_for_the_typed_configuration() {
    let value = json!({"net": [{"sriov_vf": 1}], "colour": "red", "cpus": 3});
    assert_eq!(strip(value.clone()), Ok(value));
}

#[test]
fn a_key_is_in_the_table_or_supported() {
    let mut keys = 0;
    for (_, place) in places() {
        let Key(option, key) = place else { continue };
        let supported = match *option {
            CpusConfig::OPTION => CpusConfig::keys(),
            MemoryConfig::OPTION => MemoryConfig::keys(),
            NetConfig::OPTION => NetConfig::keys(),
            DiskConfig::OPTION => DiskConfig::keys(),
            other => panic!("{other}"),
        };
        assert!(supported.iter().all(|supported| supported.name != *key), "{option} {key}");
        keys += 1;
    }
    assert_eq!(keys, 26);
}

#[test]
fn a_place_is_listed_once_and_each_feature_reads_as_a_sentence() {
    let all: Vec<_> = places().map(|(_, place)| format!("{place:?}")).collect();
    let distinct: std::collections::HashSet<_> = all.iter().collect();
    assert_eq!(distinct.len(), all.len());
    assert!(TABLE.iter().all(|missing| missing.what.ends_with(" is") || missing.what.ends_with(" are")));
}
