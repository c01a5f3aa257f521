use serde::de::DeserializeOwned;
use serde_json::json;

use super::*;
use crate::config::option::Options as _;
use crate::config::{
    CpusConfig, DeviceConfig, DiskConfig, MemoryConfig, MemoryZoneConfig, NetConfig, PayloadConfig, PlatformConfig,
    VfConfig, VmConfig,
};

/// A field is in the table or in the typed configuration, never in both: the table would refuse a supported one.
fn assert_unknown<T: DeserializeOwned>(object: Object) {
    for field in object.fields() {
        let error = serde_json::from_value::<T>(json!({field: null})).err();
        let text = error.map(|error| error.to_string()).unwrap_or_default();
        assert!(text.contains("unknown field"), "{field} is supported now; take it out of this table");
    }
}

#[test]
fn fields_of_later_versions_are_not_there() {
    assert_unknown::<VmConfig>(Object::Vm);
    assert_unknown::<CpusConfig>(Object::Cpus);
    assert_unknown::<MemoryConfig>(Object::Memory);
    assert_unknown::<MemoryZoneConfig>(Object::MemoryZone);
    assert_unknown::<PayloadConfig>(Object::Payload);
    assert_unknown::<NetConfig>(Object::Net);
    assert_unknown::<VfConfig>(Object::Vf);
    assert_unknown::<PlatformConfig>(Object::Platform);
    assert_unknown::<DiskConfig>(Object::Disk);
    assert_unknown::<DeviceConfig>(Object::Device);
}

fn strip(mut value: Value) -> Result<Value, String> {
    Object::Vm.strip(&mut value, "").map(|()| value).map_err(|error| error.to_string())
}

#[test]
fn a_field_at_its_default_is_taken_out() {
    let stripped = strip(json!({
        "cpus": {"boot_vcpus": 2, "max_vcpus": 4, "profile": "Host"},
        "platform": {"num_pci_segments": 2, "tdx": false, "uuid": null},
        "user_devices": [], "iommu": false, "landlock_rules": null, "memory": null,
    }));
    assert_eq!(
        stripped,
        Ok(json!({
            "cpus": {"boot_vcpus": 2, "max_vcpus": 4}, "platform": {"num_pci_segments": 2, "uuid": null},
            "iommu": false,
        }))
    );
}

#[test]
fn a_field_that_asks_for_something_is_refused_with_its_path() {
    for (value, what) in [
        (
            json!({"user_devices": [{"socket": "x"}]}),
            "user_devices: vfio-user devices are not supported yet; leave it out",
        ),
        (
            json!({"devices": [{"path": "x", "x_nv_gpudirect_clique": 3}]}),
            "devices[0].x_nv_gpudirect_clique: peer-to-peer cliques of GPUs are not supported yet; leave it out",
        ),
        (json!({"cpus": {"profile": "skylake"}}), "cpus.profile: CPU profiles are not supported yet; leave it out"),
        (
            json!({"net": [{"vfs": [{"index": 0, "query_rss": false}, {"query_rss": true}]}]}),
            "net[0].vfs[1].query_rss: queries of receive side scaling, which no NIC has, are not supported yet; leave \
             it out",
        ),
        (json!({"platform": {"tdx": true}}), "platform.tdx: confidential VMs are not supported yet; leave it out"),
    ] {
        assert_eq!(strip(value), Err(what.to_string()));
    }
}

#[test]
fn unknown_fields_are_left_for_the_typed_configuration() {
    let value = json!({"net": [{"sriov_vf": 1}], "colour": "red", "cpus": 3});
    assert_eq!(strip(value.clone()), Ok(value));
}

#[test]
fn a_key_is_in_the_table_or_supported() {
    for (_, place) in places() {
        let Setting(object, key, _) = place else { continue };
        let supported = match object {
            Object::Cpus => CpusConfig::keys(),
            Object::Memory => MemoryConfig::keys(),
            Object::MemoryZone => MemoryZoneConfig::keys(),
            Object::Net => NetConfig::keys(),
            Object::Vf => VfConfig::keys(),
            Object::Disk => DiskConfig::keys(),
            Object::Device => DeviceConfig::keys(),
            Object::Platform => PlatformConfig::keys(),
            other => panic!("no option describes {other:?}"),
        };
        assert!(object.option().is_some());
        assert!(supported.iter().all(|supported| supported.name != *key), "{object:?} {key}");
    }
}

/// A value of the command line that requests nothing, and one that does.
fn values(harmless: &Harmless) -> (String, String) {
    let values = |harmless: &str, other: &str| (harmless.to_string(), other.to_string());
    match harmless {
        Harmless::Word(_, word) => values(word, "other"),
        Harmless::Empty(_) => values("[]", "[1]"),
        Harmless::Null(_) | Harmless::NullByte | Harmless::If(_) => values("", "x"),
    }
}

#[test]
fn unsupported_key_is_accepted_only_at_its_default() {
    let parse = |object: Object, text: &str| match object {
        Object::Cpus => text.parse::<CpusConfig>().map(drop),
        Object::Memory => text.parse::<MemoryConfig>().map(drop),
        Object::MemoryZone => format!("id=z,size=1M,{text}").parse::<MemoryZoneConfig>().map(drop),
        Object::Net => text.parse::<NetConfig>().map(drop),
        Object::Vf => format!("pf=p,index=0,{text}").parse::<crate::config::NetVf>().map(drop),
        Object::Disk => text.parse::<DiskConfig>().map(drop),
        Object::Device => format!("path=/d,{text}").parse::<DeviceConfig>().map(drop),
        Object::Platform => text.parse::<PlatformConfig>().map(drop),
        other => panic!("no option describes {other:?}"),
    };
    let mut keys = 0;
    for (what, place) in places() {
        if let Setting(object, key, harmless) = place {
            let (default, other) = values(harmless);
            // No key of --net-vf may be empty.
            let is_taken = *object != Object::Vf || !default.is_empty();
            assert_eq!(parse(*object, &format!("{key}={default}")).is_ok(), is_taken, "{object:?} {key}");
            let said = parse(*object, &format!("{key}={other}")).unwrap_err().to_string();
            assert!(said.ends_with(&format!("{what} not supported yet; leave {key} out")), "{said}");
            keys += 1;
        }
        if let Setting(object, field, harmless) | Field(object, field, harmless) = place
            && let Some(default) = harmless.value()
        {
            assert_eq!(object.strip(&mut json!({*field: default}), ""), Ok(()), "{object:?} {field}");
        }
    }
    assert!(keys > 3, "{keys}");
}

#[test]
fn printed_config_has_cloud_hypervisor_defaults_and_reparses() {
    let mut config = VmConfig::default();
    config.disks.push(DiskConfig::default());
    let mut printed = serde_json::to_value(&config).unwrap();
    Object::Vm.fill_in(&mut printed);
    let has = |printed: &Value, expected: Value| {
        for (field, value) in expected.as_object().unwrap() {
            assert_eq!(printed.get(field), Some(value), "{field}");
        }
    };
    has(&printed, json!({"iommu": false, "watchdog": false, "pvpanic": false, "landlock_enable": false}));
    has(&printed, json!({"debug_console": {"mode": "Off", "iobase": 0xe9}}));
    has(
        &printed["cpus"],
        json!({"kvm_hyperv": false, "max_phys_bits": 46, "features": {"amx": false}, "nested": true,
            "core_scheduling": "Vm", "profile": "Host"}),
    );
    has(&printed["memory"], json!({"mergeable": false, "hotplug_method": "Acpi", "reserve": false}));
    has(
        &printed["disks"][0],
        json!({"vhost_user": false, "sparse": true, "image_type": "Unknown", "backing_files": false,
            "lock_granularity": "ByteRange"}),
    );
    for (object, field) in [(&printed, "platform"), (&printed, "gdb"), (&printed["memory"], "hotplug_size")] {
        assert_eq!(object.get(field), None, "{field}");
    }
    assert_eq!(VmConfig::from_json(printed.to_string().as_bytes()), Ok(config));
}

#[test]
fn a_place_is_listed_once_and_each_feature_reads_as_a_sentence() {
    let all: Vec<_> = places().map(|(_, place)| format!("{place:?}")).collect();
    let distinct: std::collections::HashSet<_> = all.iter().collect();
    assert_eq!(distinct.len(), all.len());
    assert!(TABLE.iter().all(|missing| missing.what.ends_with(" is") || missing.what.ends_with(" are")));
}

#[test]
fn special_build_keys_are_refused_by_name_except_at_default() {
    for key in ["tdx", "sev_snp"] {
        for value in ["off", "false", ""] {
            assert_eq!(format!("{key}={value}").parse::<PlatformConfig>(), Ok(PlatformConfig::default()), "{key}");
        }
        let refused = format!("{key}=on").parse::<PlatformConfig>().unwrap_err().to_string();
        assert_eq!(refused, format!("--platform {key}=on: confidential VMs are not supported yet; leave {key} out"));
    }
    for option in ["--dbus-service-name", "--dbus-object-path", "--dbus-system-bus"] {
        assert_eq!(flag(option), Some("the D-Bus API is"));
    }
}
