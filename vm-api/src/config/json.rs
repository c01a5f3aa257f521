//! A whole virtual machine as JSON: the body of `vm.create`, and the file of `--config`.

use serde::de::Error as _;
use serde::ser::Error as _;
use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};
use serde_json::Value;

use crate::config::unsupported;
use crate::config::{ConfigError, Problem, VmConfig};
use crate::document::{self, DocumentError};
use crate::typed::typed;

/// Removes the fields that are null, at any depth: they request nothing, also if they are unknown.
pub fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            fields.values_mut().for_each(drop_nulls);
        }
        Value::Array(elements) => elements.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

/// Serializes as `vm.info` and `--print-config` print it: with the unsupported fields of Cloud Hypervisor at their
/// defaults, which clients expect.
#[expect(clippy::missing_errors_doc, reason = "serde's")]
pub fn serialize<S: Serializer>(config: &VmConfig, serializer: S) -> Result<S::Ok, S::Error> {
    let mut value = serde_json::to_value(config).map_err(S::Error::custom)?;
    unsupported::Object::Vm.fill_in(&mut value);
    value.serialize(serializer)
}

/// Deserializes the output of [`serialize`].
#[expect(clippy::missing_errors_doc, reason = "serde's")]
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<VmConfig, D::Error> {
    let mut value = Value::deserialize(deserializer)?;
    drop_nulls(&mut value);
    unsupported::Object::Vm.strip(&mut value, "").map_err(D::Error::custom)?;
    typed(value).map_err(D::Error::custom)
}

impl VmConfig {
    /// Parses the JSON of `vm.create`. Unsupported fields of Cloud Hypervisor may be given at their defaults.
    /// Consistency of the values is checked when planning.
    ///
    /// # Errors
    ///
    /// Fails with the first invalid value, and its path in the document.
    pub fn from_json(text: &[u8]) -> Result<Self, ConfigError> {
        let wrong = |path: &str, what: String| ConfigError::new(path, Problem::Syntax(what));
        let mut value = document::read(text).map_err(|error| match error {
            DocumentError::Syntax(_) => wrong("the document", error.to_string()),
            DocumentError::Content { path, what } => wrong(&path, what),
        })?;
        if !value.is_object() {
            return Err(wrong("the document", "JSON, but not an object".to_string()));
        }
        drop_nulls(&mut value);
        unsupported::Object::Vm.strip(&mut value, "")?;
        typed(value).map_err(|error| match error.path().to_string().as_str() {
            "." => wrong("the document", error.inner().to_string()),
            path => wrong(path, error.inner().to_string()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        VmConfig::from_json(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn an_array_is_no_object_at_any_depth() {
        for (document, path) in [
            (r#"{"payload": ["kernel"]}"#, "payload"),
            (r#"{"payload": {}, "disks": [["/a"]]}"#, "disks[0]"),
            (
                r#"{"payload": {}, "disks": [{"path": "/a", "rate_limiter_config": [1, 2]}]}"#,
                "disks[0].rate_limiter_config",
            ),
        ] {
            let error = refused(document);
            assert!(error.starts_with(path) && error.contains("sequence, expected an object"), "{error}");
        }
    }

    #[test]
    fn a_configuration_reads_back_from_what_is_written() {
        let mut config = VmConfig::default();
        config.payload.kernel = Some("vmlinux".into());
        config.net.push("id=pf0,sriov_vfs=4".parse().unwrap());
        let text = serde_json::to_vec(&config).unwrap();
        assert_eq!(VmConfig::from_json(&text), Ok(config));
    }

    #[test]
    fn an_unreadable_value_is_named_by_its_path() {
        assert!(refused("{").starts_with("the document: not JSON: "));
        assert_eq!(refused("[]"), "the document: JSON, but not an object");
        let said = refused(r#"{"cpus": {"boot_vcpus": 1, "boot_vcpus": 2}}"#);
        assert_eq!(said, "cpus.boot_vcpus: the key is given twice; give it once");
        assert!(refused(r#"{"colour": 1}"#).contains("unknown field `colour`"));
        let misspelled = refused(r#"{"payload": {"kernel": "k"}, "net": [{"tapp": "t"}]}"#);
        assert!(misspelled.ends_with("unknown field `tapp`; did you mean `tap`?"), "{misspelled}");
        let said = refused(r#"{"net": [{}, {"sriov_vfs": -1}]}"#);
        assert!(
            said.contains("net[1]") && said.contains("sriov_vfs") || said.contains("expected a whole number"),
            "{said}"
        );
        assert_eq!(
            refused(r#"{"user_devices": [{"socket": "x"}]}"#),
            "user_devices: vfio-user devices are not supported yet; leave it out"
        );
    }

    #[test]
    fn both_spellings_of_generic_vhost_user_devices_are_read() {
        for key in ["generic_vhost_user", "generic-vhost-user"] {
            let device = r#"{"device_type": 34, "socket": "/s", "queue_sizes": [64]}"#;
            let read = VmConfig::from_json(format!(r#"{{"{key}": [{device}]}}"#).as_bytes()).unwrap();
            assert_eq!(read.generic_vhost_user, ["device_type=i2c,socket=/s,queue_sizes=[64]".parse().unwrap()]);
            assert_eq!(VmConfig::from_json(format!(r#"{{"{key}": null}}"#).as_bytes()), Ok(VmConfig::default()));
        }
    }

    #[test]
    fn null_is_as_if_it_were_left_out_wherever_it_is() {
        let text = br#"{"rtc": null, "colour": null, "cpus": {"boot_vcpus": null, "x": null}, "console": null,
            "payload": {"kernel": "k", "mrconfigid": null, "host_data": null, "firmware": null, "initramfs": null},
            "net": [{"x": null, "vfs": [{"index": 0, "x": null}]}], "disks": [{"path": "d", "vhost_socket": null,
            "rate_limiter_config": {"bandwidth": null, "ops": {"size": 1, "refill_time": 1, "x": null}}}]}"#;
        let read = VmConfig::from_json(text).unwrap();
        assert_eq!((read.cpus, read.payload.kernel), (Default::default(), Some("k".into())));
        assert_eq!((read.net[0].vfs.len(), read.console), (1, VmConfig::default().console));
        assert_eq!(refused(r#"{"payload": {"mrconfigid": "x"}}"#).split(':').next(), Some("payload.mrconfigid"));
    }

    #[test]
    fn a_field_of_a_later_version_may_be_there_at_its_default() {
        let read = VmConfig::from_json(br#"{"iommu": false, "devices": null, "payload": {"kernel": "k"}}"#).unwrap();
        assert_eq!(read.payload.kernel, Some("k".into()));
    }
}
