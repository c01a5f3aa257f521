//! `state.json`: what a restored VM needs besides its configuration and memory.
//!
//! The checksum detects truncation and changes, but not forgery: an attacker can recompute it, so all contents are
//! checked as untrusted. The checksum covers values, so that another program may rewrite the file with other whitespace
//! or key order.

use std::fmt;

use crc::{CRC_64_XZ, Crc};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use vm_api::typed;

use crate::config::LinkPolicy;
use crate::lazy_memory::image_layout::ImageLayout;
use crate::lazy_memory::memory_image::SnapshotId;

/// Value of `format`, which tells the file from those of other programs.
const FORMAT: &str = "cloud-hypervisor-sriov snapshot";
/// Version of written files. Each version is read by its own release and the next two. Version 1 had large integers as
/// numbers.
const VERSION: u64 = 2;
/// Oldest version that is read.
const OLDEST: u64 = 1;
/// Largest integer that programs with numbers as doubles keep exact (RFC 8259 §6).
const EXACT: u64 = (1 << 53) - 1;
/// Prefix of larger integers, which are text.
const INTEGER: &str = "int:";
/// Prefix of texts that start with one of these prefixes.
const TEXT: &str = "text:";

static CHECKSUM: Crc<u64> = Crc::<u64>::new(&CRC_64_XZ);

/// Saved VM without its configuration and the contents of its memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedState {
    /// Id of the snapshot, also in the memory file.
    pub id: Id,
    /// Program that wrote the file, for information.
    pub program: String,
    /// Layout of the memory file.
    pub memory: ImageLayout,
    /// Network functions whose tap descriptors must be passed again.
    pub descriptors: Vec<SavedDescriptors>,
    /// VF links that clients had set.
    pub links: Vec<SavedLink>,
    /// vCPUs, clocks, interrupt controllers and devices.
    pub machine: Value,
}

/// A network function with tap descriptors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedDescriptors {
    /// Id of the NIC.
    pub id: String,
    /// Index of the VF; `None` for the NIC's own function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vf: Option<u16>,
    /// Number of descriptors.
    pub count: usize,
}

/// Link of a VF that a client had set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedLink {
    /// Id of the PF.
    pub id: String,
    /// Index of the VF.
    pub vf: u16,
    /// Setting of the link.
    pub link: LinkPolicy,
}

/// Id of a snapshot, as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Id(pub SnapshotId);

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&super::folder::hex(&self.0))
    }
}

impl From<Id> for String {
    fn from(id: Id) -> Self {
        id.to_string()
    }
}

impl TryFrom<String> for Id {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, &'static str> {
        let wrong = "not 32 hexadecimal digits";
        let digits = text.as_bytes();
        if digits.len() != 32 || !digits.iter().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(wrong);
        }
        Ok(Self(u128::from_str_radix(&text, 16).map_err(|_| wrong)?.to_be_bytes()))
    }
}

impl SavedState {
    /// Serializes the file.
    ///
    /// # Errors
    ///
    /// Fails if a part cannot be JSON.
    pub(crate) fn to_file(&self) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::to_vec(&document(portable(serde_json::to_value(self)?)))
    }

    /// Parses the file.
    ///
    /// # Errors
    ///
    /// Fails with the fault, and its remedy.
    pub(crate) fn from_file(bytes: &[u8]) -> Result<Self, String> {
        let value: Value = serde_json::from_slice(bytes).map_err(|error| match error.classify() {
            serde_json::error::Category::Eof => "it was cut short; copy it again".to_string(),
            _ => format!("not JSON: {error}"),
        })?;
        let Value::Object(mut document) = value else { return Err("JSON, but not an object".to_string()) };
        let version = version_of(&document)?;
        let state = document.remove("state").ok_or("it has no state; copy it again")?;
        if document.get("checksum").and_then(Value::as_str) != Some(&checksum(&state)) {
            return Err("its checksum is wrong: it was changed or damaged; copy it again".to_string());
        }
        let state = if version == OLDEST { state } else { with_integers(state) };
        typed::typed(state).map_err(|error| format!("state.{}: {}", error.path(), error.inner()))
    }
}

/// Wraps a state into the whole file.
pub(super) fn document(state: Value) -> Value {
    serde_json::json!({"format": FORMAT, "version": VERSION, "checksum": checksum(&state), "state": state})
}

/// Converts large integers in `value` to text, which every JSON library keeps.
fn portable(value: Value) -> Value {
    map_scalars(value, &|value| match value {
        Value::Number(number) => {
            let is_exact = number.as_i64().is_none_or(|number| number.unsigned_abs() <= EXACT)
                && number.as_u64().is_none_or(|number| number <= EXACT);
            if is_exact { Value::Number(number) } else { Value::String(format!("{INTEGER}{number}")) }
        }
        Value::String(text) if text.starts_with(INTEGER) || text.starts_with(TEXT) => {
            Value::String(format!("{TEXT}{text}"))
        }
        other => other,
    })
}

/// Reverts [`portable`].
fn with_integers(value: Value) -> Value {
    map_scalars(value, &|value| {
        let Value::String(text) = &value else { return value };
        if let Some(text) = text.strip_prefix(TEXT) {
            return Value::from(text);
        }
        let Some(number) = text.strip_prefix(INTEGER) else { return value };
        let signed = || number.parse::<i64>().map(Value::from);
        number.parse::<u64>().map(Value::from).or_else(|_| signed()).unwrap_or(value)
    })
}

/// Replaces each scalar in `value`. The parser bounds the depth.
fn map_scalars(value: Value, replace: &impl Fn(Value) -> Value) -> Value {
    match value {
        Value::Array(all) => all.into_iter().map(|value| map_scalars(value, replace)).collect(),
        Value::Object(all) => all.into_iter().map(|(key, value)| (key, map_scalars(value, replace))).collect(),
        scalar => replace(scalar),
    }
}

/// Returns the checksum of `state` in canonical form: compact, with sorted keys.
fn checksum(state: &Value) -> String {
    format!("crc64:{:016x}", CHECKSUM.checksum(state.to_string().as_bytes()))
}

/// Returns the version of a supported file.
fn version_of(document: &Map<String, Value>) -> Result<u64, String> {
    if document.get("format").and_then(Value::as_str) != Some(FORMAT) {
        // Keys of Cloud Hypervisor's snapshot tree.
        let whose = if document.contains_key("snapshots") || document.contains_key("snapshot_data") {
            "the state of another program, Cloud Hypervisor, whose machine differs"
        } else {
            "not the state of a VM of this program"
        };
        return Err(format!("{whose}; take the snapshot with this program"));
    }
    match document.get("version").and_then(Value::as_u64) {
        Some(version @ OLDEST..=VERSION) => Ok(version),
        Some(version) if version > VERSION => {
            Err(format!("version {version}, and this program reads up to {VERSION}; use a later version of it"))
        }
        _ => Err("a version that this program does not read; use the one that wrote it".to_string()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn state() -> SavedState {
        SavedState {
            id: Id([0xa5; 16]),
            program: "test".to_string(),
            memory: ImageLayout::of(std::iter::once(0..64 << 20)).unwrap(),
            descriptors: vec![SavedDescriptors { id: "a".to_string(), vf: None, count: 1 }],
            links: vec![SavedLink { id: "pf0".to_string(), vf: 3, link: LinkPolicy::Down }],
            machine: serde_json::json!({
                "z": 1, "a": [2.5, "ü", null], "text": ["int:5", "text:"],
                "large": [u64::MAX, i64::MIN, EXACT, EXACT + 1],
            }),
        }
    }

    #[test]
    fn a_state_reads_back() {
        let bytes = state().to_file().unwrap();
        assert_eq!(SavedState::from_file(&bytes), Ok(state()));
    }

    /// Converts `value` as a program with numbers as doubles does.
    fn through_doubles(value: Value) -> Value {
        map_scalars(value, &|value| match value.as_f64() {
            Some(number) if number.fract() == 0.0 && number.abs() < 1e21 => {
                serde_json::from_str(&format!("{number:.0}")).unwrap()
            }
            Some(number) => number.into(),
            None => value,
        })
    }

    #[test]
    fn a_file_written_again_by_any_json_library_reads_the_same() {
        let value: Value = serde_json::from_slice(&state().to_file().unwrap()).unwrap();
        let again = serde_json::to_vec_pretty(&through_doubles(value)).unwrap();
        assert_eq!(SavedState::from_file(&again), Ok(state()));
    }

    #[test]
    fn a_file_of_version_1_is_read() {
        // Version 1 has large integers as numbers, and texts without prefixes.
        let mut old = document(serde_json::to_value(state()).unwrap());
        old["version"] = OLDEST.into();
        assert_eq!(SavedState::from_file(old.to_string().as_bytes()), Ok(state()));
    }

    #[test]
    fn truncated_or_modified_state_file_is_refused_in_one_line() {
        let bytes = state().to_file().unwrap();
        for len in 0..bytes.len() {
            let said = SavedState::from_file(&bytes[..len]).unwrap_err();
            assert!(!said.contains('\n'), "{said}");
        }
        for n in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[n] ^= 1;
            if let Err(said) = SavedState::from_file(&changed) {
                assert!(!said.contains('\n'), "{said}");
            } else {
                panic!("byte {n} may be anything: {}", String::from_utf8_lossy(&bytes[n.saturating_sub(20)..n]));
            }
        }
    }

    #[test]
    fn another_programs_state_and_later_versions_are_distinguished() {
        let said = |value: Value| SavedState::from_file(value.to_string().as_bytes()).unwrap_err();
        assert!(said(serde_json::json!({"snapshots": {}, "snapshot_data": {}})).contains("Cloud Hypervisor"));
        assert!(said(serde_json::json!({})).starts_with("not the state"));
        assert!(said(serde_json::json!([])).contains("not an object"));
        let later = serde_json::json!({"format": FORMAT, "version": 3});
        assert_eq!(said(later), "version 3, and this program reads up to 2; use a later version of it");
        let mut unknown: Value = serde_json::from_slice(&state().to_file().unwrap()).unwrap();
        unknown["state"]["colour"] = 1.into();
        unknown["checksum"] = checksum(&unknown["state"]).into();
        assert!(said(unknown).contains("unknown field `colour`"));
    }
}
