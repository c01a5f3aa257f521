//! Places where an unsupported feature can be requested, and the values that request nothing.

use serde_json::{Map, Value, json};

use crate::schema::reference;

/// A feature that is not supported yet.
#[derive(Debug)]
pub struct Missing {
    /// Name, with its verb: `TPMs are`. "not supported yet" follows.
    pub what: &'static str,
    /// The places where Cloud Hypervisor has it.
    pub(super) places: &'static [Place],
}

/// A place where a feature is requested.
#[derive(Debug)]
pub(super) enum Place {
    /// An option of the command line: `--tpm`.
    Flag(&'static str),
    /// A key of the object's option and a JSON field of the object, with the same name.
    Setting(Object, &'static str, Harmless),
    /// A JSON field of the object only.
    Field(Object, &'static str, Harmless),
    /// An endpoint of the API: `vm.coredump`.
    Endpoint(&'static str),
}

/// A JSON object of Cloud Hypervisor's, by the field that holds it, and its option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Object {
    /// `VmConfig`.
    Vm,
    /// `CpusConfig`.
    Cpus,
    /// `MemoryConfig`.
    Memory,
    /// `MemoryZoneConfig`.
    MemoryZone,
    /// `PayloadConfig`.
    Payload,
    /// `NetConfig`.
    Net,
    /// `VfConfig`, which only this program has.
    Vf,
    /// `DiskConfig`.
    Disk,
    /// `DeviceConfig`.
    Device,
    /// `PlatformConfig`.
    Platform,
    /// An object whose fields are all supported.
    Whole,
}

/// The values that request nothing. Null, and an empty value on the command line, never request anything.
///
/// `vm.info` and `--print-config` print those that are a single value: Cloud Hypervisor has them in every VM.
#[derive(Debug)]
pub enum Harmless {
    /// Only null. In Cloud Hypervisor the field has this JSON type.
    Null(&'static str),
    /// Only null. In Cloud Hypervisor the field is a number from 0 to 255.
    NullByte,
    /// This value, in JSON and on the command line.
    Word(&'static str, &'static str),
    /// An empty array. In Cloud Hypervisor its elements have this JSON type, or this schema.
    Empty(&'static str),
    /// Booleans that the function accepts, given also the object with the field. The command line has no object.
    If(fn(&Value, &Map<String, Value>) -> bool),
}

impl Object {
    /// The option of the command line for the object.
    pub(super) const fn option(self) -> Option<&'static str> {
        match self {
            Self::Cpus => Some("--cpus"),
            Self::Memory => Some("--memory"),
            Self::MemoryZone => Some("--memory-zone"),
            Self::Net => Some("--net"),
            Self::Vf => Some("--net-vf"),
            Self::Disk => Some("--disk"),
            Self::Device => Some("--device"),
            Self::Platform => Some("--platform"),
            Self::Vm | Self::Payload | Self::Whole => None,
        }
    }
}

impl Harmless {
    /// The schema of the field, for the API's description.
    pub(super) fn schema(&self, what: &str) -> Value {
        let subject = what.trim_end_matches(" are").trim_end_matches(" is");
        let about = format!("Not yet: {subject}.");
        match self {
            Self::Null(ty) => json!({"type": ty, "nullable": true, "description": about}),
            Self::NullByte => json!({
                "type": "integer", "nullable": true, "format": "int32", "minimum": 0, "maximum": 255,
                "description": about,
            }),
            Self::Word(value, _) => json!({"type": "string", "nullable": true, "default": value, "description": about}),
            Self::Empty(items) => {
                let items = match *items {
                    "object" => json!({"type": "object"}),
                    schema => reference(schema),
                };
                json!({"type": "array", "nullable": true, "items": items, "description": about})
            }
            Self::If(_) => json!({"type": "boolean", "nullable": true, "default": false, "description": about}),
        }
    }

    /// The single value, as JSON.
    pub(super) fn value(&self) -> Option<Value> {
        match self {
            Self::Word(value, _) => Some((*value).into()),
            Self::Null(_) | Self::NullByte | Self::Empty(_) | Self::If(_) => None,
        }
    }
}
