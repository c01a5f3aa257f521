//! A whole virtual machine as JSON: the body of `vm.create`, and the file of `--config`.

use crate::config::unsupported;
use crate::config::{ConfigError, Problem, VmConfig};
use crate::document::{self, DocumentError};

impl VmConfig {
    /// Reads the JSON of `vm.create`. Fields of Cloud Hypervisor that are not supported yet may be given at their
    /// defaults. Whether the values fit together is for the plan to check.
    ///
    /// # Errors
    ///
    /// What cannot be read, with its path in the document.
    pub fn from_json(text: &[u8]) -> Result<Self, ConfigError> {
        let wrong = |path: &str, what: String| ConfigError::new(path, Problem::Syntax(what));
        let mut value = document::read(text).map_err(|error| match error {
            DocumentError::Syntax(_) => wrong("the document", error.to_string()),
            DocumentError::Content { path, what } => wrong(&path, what),
        })?;
        if !value.is_object() {
            return Err(wrong("the document", "JSON, but not an object".to_string()));
        }
        unsupported::Object::Vm.strip(&mut value, "")?;
        serde_path_to_error::deserialize(value).map_err(|error| match error.path().to_string().as_str() {
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
    fn a_configuration_reads_back_from_what_is_written() {
        let mut config = VmConfig::default();
        config.payload.kernel = Some("vmlinux".into());
        config.net.push("id=pf0,sriov_vfs=4".parse().unwrap());
        let text = serde_json::to_vec(&config).unwrap();
        assert_eq!(VmConfig::from_json(&text), Ok(config));
    }

    #[test]
    fn what_cannot_be_read_is_named_by_its_path() {
        assert!(refused("{").starts_with("the document: not JSON: "));
        assert_eq!(refused("[]"), "the document: JSON, but not an object");
        let said = refused(r#"{"cpus": {"boot_vcpus": 1, "boot_vcpus": 2}}"#);
        assert_eq!(said, "cpus.boot_vcpus: the key is given twice; give it once");
        assert!(refused(r#"{"colour": 1}"#).contains("unknown field `colour`"));
        let said = refused(r#"{"net": [{}, {"sriov_vfs": -1}]}"#);
        assert!(said.contains("net[1]") && said.contains("sriov_vfs") || said.contains("expected u16"), "{said}");
        assert_eq!(refused(r#"{"fs": [{"tag": "x"}]}"#), "fs: shared file systems are not supported yet; leave it out");
    }

    #[test]
    fn a_field_of_a_later_version_may_be_there_at_its_default() {
        let read = VmConfig::from_json(br#"{"iommu": false, "fs": null, "payload": {"kernel": "k"}}"#).unwrap();
        assert_eq!(read.payload.kernel, Some("k".into()));
    }
}
