//! Places where a feature that is not supported yet is asked for, and the values that ask for nothing.

use serde_json::{Map, Value};

/// A feature that is not supported yet.
#[derive(Debug)]
pub struct Missing {
    /// Name, with its verb: `TPMs are`. "not supported yet" follows.
    pub what: &'static str,
    /// Places where Cloud Hypervisor has it.
    pub(super) places: &'static [Place],
}

/// Place where a feature is asked for.
#[derive(Debug)]
pub(super) enum Place {
    /// By an option of the command line: `--tpm`.
    Flag(&'static str),
    /// By a key of the object's option and a JSON field of the object, which have the same name.
    Setting(Object, &'static str, Harmless),
    /// By a JSON field of the object alone.
    Field(Object, &'static str, Harmless),
    /// By an endpoint of the API: `vm.add-pmem`.
    Endpoint(&'static str),
}

/// A JSON object of Cloud Hypervisor's, by the field that holds it, and the option that describes the same.
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
    /// `VfConfig`, which is this program's own.
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

/// The values that ask for nothing. Null, and an empty value on the command line, always do not.
///
/// `vm.info` and `--print-config` print those that are one value: Cloud Hypervisor has them in every VM.
#[derive(Debug)]
pub enum Harmless {
    /// None but null.
    Null,
    /// This one, in JSON and on the command line.
    Word(&'static str, &'static str),
    /// An empty array.
    Empty,
    /// Values that the function accepts, which also sees the object that has the field. The command line has no object.
    If(fn(&Value, &Map<String, Value>) -> bool),
}

impl Object {
    /// The option of the command line that describes it.
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
    /// The one value, as JSON.
    pub(super) fn value(&self) -> Option<Value> {
        match self {
            Self::Word(value, _) => Some((*value).into()),
            Self::Null | Self::Empty | Self::If(_) => None,
        }
    }
}
