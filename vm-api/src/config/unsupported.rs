//! What Cloud Hypervisor has and this version does not support yet: one table for the command line, JSON and the API.
//!
//! A client may send such a JSON field at its default, as generated clients do; it is removed before the document
//! becomes a typed configuration. Any other value is refused, never ignored. Unknown fields stay, for the typed
//! configuration to refuse.

use serde_json::{Map, Value};

use crate::config::error::{ConfigError, Problem};

/// A feature that is not supported yet.
#[derive(Debug)]
pub struct Missing {
    /// What it is, with its verb: `vsock devices are`. "not supported yet" follows.
    pub what: &'static str,
    /// Where it is asked for in Cloud Hypervisor.
    places: &'static [Place],
}

/// Where a feature is asked for.
#[derive(Debug)]
enum Place {
    /// By an option of the command line: `--vsock`.
    Flag(&'static str),
    /// By a key of an option.
    Key(&'static str, &'static str),
    /// By a JSON field of this object, unless its value asks for nothing.
    Field(Object, &'static str, Harmless),
    /// By an endpoint of the API: `vm.add-vsock`.
    Endpoint(&'static str),
}

/// A JSON object of Cloud Hypervisor's, by the field that holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Object {
    /// `VmConfig`.
    Vm,
    /// `CpusConfig`.
    Cpus,
    /// `CpuFeatures`.
    CpuFeatures,
    /// `MemoryConfig`.
    Memory,
    /// `PayloadConfig`.
    Payload,
    /// `ConsoleConfig` and `SerialConfig`.
    Console,
    /// `DebugConsoleConfig`.
    DebugConsole,
    /// `DiskConfig`.
    Disk,
    /// `PlatformConfig`.
    Platform,
    /// An object whose fields are all supported.
    Whole,
}

/// The values of a field that ask for nothing. Null always does not.
#[derive(Debug)]
enum Harmless {
    /// None but null.
    Null,
    /// This one.
    Is(bool),
    /// This one.
    Number(u64),
    /// These, both included.
    Numbers(u64, u64),
    /// One of these.
    Text(&'static [&'static str]),
    /// An empty array or object.
    Empty,
    /// An object whose fields all ask for nothing.
    Object(Object),
    /// Those that the function accepts, which also sees the object that has the field.
    If(fn(&Value, &Map<String, Value>) -> bool),
}

use Harmless::{Empty, If, Is, Null, Number, Numbers, Text};
use Object::{Console, CpuFeatures, Cpus, DebugConsole, Disk, Memory, Payload, Platform, Vm};
use Place::{Endpoint, Field, Flag, Key};

/// `iommu=on` of a device.
pub const VIRTUAL_IOMMU: &str = "virtual IOMMUs are";
/// `pci_segment` of a device, other than 0.
pub const PCI_SEGMENT: &str = "additional PCI segments are";
/// Rate limits of a NIC.
pub const NET_RATE_LIMIT: &str = "rate limits for NICs are";
/// `image_type` of a disk, other than raw.
pub const IMAGE_TYPE: &str = "image formats other than raw are";

const fn missing(what: &'static str, places: &'static [Place]) -> Missing {
    Missing { what, places }
}

/// All features that are not supported yet.
pub const TABLE: &[Missing] = &[
    // Devices.
    missing("memory balloons are", &[Flag("--balloon"), Field(Vm, "balloon", Null)]),
    missing("shared file systems are", &[Flag("--fs"), Field(Vm, "fs", Empty), Endpoint("vm.add-fs")]),
    missing(
        "generic vhost-user devices are",
        &[
            Flag("--generic-vhost-user"),
            Field(Vm, "generic-vhost-user", Empty),
            Field(Vm, "generic_vhost_user", Empty),
            Endpoint("vm.add-generic-vhost-user"),
        ],
    ),
    missing("persistent memory devices are", &[Flag("--pmem"), Field(Vm, "pmem", Empty), Endpoint("vm.add-pmem")]),
    missing("vsock devices are", &[Flag("--vsock"), Field(Vm, "vsock", Null), Endpoint("vm.add-vsock")]),
    missing("VFIO devices are", &[Flag("--device"), Field(Vm, "devices", Empty), Endpoint("vm.add-device")]),
    missing(
        "vfio-user devices are",
        &[Flag("--user-device"), Field(Vm, "user_devices", Empty), Endpoint("vm.add-user-device")],
    ),
    missing("TPMs are", &[Flag("--tpm"), Field(Vm, "tpm", Null)]),
    missing("watchdogs are", &[Flag("--watchdog"), Field(Vm, "watchdog", Is(false))]),
    missing("pvpanic devices are", &[Flag("--pvpanic"), Field(Vm, "pvpanic", Is(false))]),
    missing("pvmemcontrol devices are", &[Field(Vm, "pvmemcontrol", Null)]),
    missing("ivshmem devices are", &[Field(Vm, "ivshmem", Null)]),
    missing("fw_cfg devices are", &[Field(Vm, "fw_cfg_config", Null)]),
    missing(
        "debug consoles are",
        &[
            Flag("--debug-console"),
            Field(Vm, "debug_console", Harmless::Object(DebugConsole)),
            Field(DebugConsole, "mode", Text(&["Off"])),
            Field(DebugConsole, "file", Null),
            Field(DebugConsole, "iobase", Number(0xe9)),
        ],
    ),
    missing("console names are", &[Field(Console, "id", Null)]),
    missing("choosing the console's slot is", &[Field(Console, "pci_device_id", Null)]),
    // Disks and NICs.
    missing(
        NET_RATE_LIMIT,
        &[
            Key("--net", "bw_size"),
            Key("--net", "bw_one_time_burst"),
            Key("--net", "bw_refill_time"),
            Key("--net", "ops_size"),
            Key("--net", "ops_one_time_burst"),
            Key("--net", "ops_refill_time"),
        ],
    ),
    missing(
        "rate limit groups are",
        &[
            Flag("--rate-limit-group"),
            Key("--disk", "rate_limit_group"),
            Field(Vm, "rate_limit_groups", Empty),
            Field(Disk, "rate_limit_group", Null),
        ],
    ),
    missing(
        "vhost-user disks are",
        &[
            Key("--disk", "vhost_user"),
            Key("--disk", "socket"),
            Field(Disk, "vhost_user", Is(false)),
            Field(Disk, "vhost_socket", Null),
        ],
    ),
    missing("pinned queues are", &[Key("--disk", "queue_affinity"), Field(Disk, "queue_affinity", Empty)]),
    missing(IMAGE_TYPE, &[]),
    missing(
        "images with backing files are",
        &[Key("--disk", "backing_files"), Field(Disk, "backing_files", Is(false))],
    ),
    missing(
        "choosing the granularity of locks is",
        &[Key("--disk", "lock_granularity"), Field(Disk, "lock_granularity", Text(&["ByteRange"]))],
    ),
    missing("choosing whether images are sparse is", &[Key("--disk", "sparse"), Field(Disk, "sparse", Is(true))]),
    missing(
        "choosing the I/O engine is",
        &[Field(Disk, "disable_io_uring", Is(false)), Field(Disk, "disable_aio", Is(false))],
    ),
    missing("resizing disks is", &[Endpoint("vm.resize-disk")]),
    // PCI.
    missing(
        VIRTUAL_IOMMU,
        &[
            Field(Vm, "iommu", Is(false)),
            Field(Console, "iommu", Is(false)),
            Field(Platform, "iommu_segments", Empty),
            Field(Platform, "iommu_address_width", Number(64)),
            Field(Platform, "iommu_address_width_bits", Number(64)),
        ],
    ),
    missing(
        PCI_SEGMENT,
        &[
            Flag("--pci-segment"),
            Field(Vm, "pci_segments", Empty),
            Field(Console, "pci_segment", Number(0)),
            // More segments change nothing as long as no device is on one, which is refused at the device. Kata always
            // asks for 2.
            Field(Platform, "num_pci_segments", Numbers(1, 96)),
        ],
    ),
    missing("iommufd is", &[Field(Platform, "iommufd", Is(false)), Field(Platform, "iommufd_fd", Null)]),
    missing("choosing DMA between devices is", &[Field(Platform, "vfio_p2p_dma", Is(true))]),
    // vCPUs.
    missing("CPU topologies are", &[Key("--cpus", "topology"), Field(Cpus, "topology", If(is_own_topology))]),
    missing("Hyper-V enlightenments are", &[Key("--cpus", "kvm_hyperv"), Field(Cpus, "kvm_hyperv", Is(false))]),
    missing(
        "limiting the physical address width is",
        &[Key("--cpus", "max_phys_bits"), Field(Cpus, "max_phys_bits", Number(46))],
    ),
    missing("pinned vCPUs are", &[Key("--cpus", "affinity"), Field(Cpus, "affinity", Empty)]),
    missing(
        "additional CPU features are",
        &[
            Key("--cpus", "features"),
            Field(Cpus, "features", Harmless::Object(CpuFeatures)),
            Field(CpuFeatures, "amx", Is(false)),
        ],
    ),
    missing("choosing nested virtualisation is", &[Key("--cpus", "nested"), Field(Cpus, "nested", Is(true))]),
    missing("core scheduling is", &[Key("--cpus", "core_scheduling"), Field(Cpus, "core_scheduling", Text(&["Vm"]))]),
    missing("CPU profiles are", &[Key("--cpus", "profile"), Field(Cpus, "profile", Text(&["host", "Host"]))]),
    // Memory.
    missing("merging equal pages is", &[Key("--memory", "mergeable"), Field(Memory, "mergeable", Is(false))]),
    missing(
        "memory hot-plug is",
        &[
            Key("--memory", "hotplug_method"),
            Key("--memory", "hotplug_size"),
            Key("--memory", "hotplugged_size"),
            Field(Memory, "hotplug_method", Text(&["Acpi"])),
            Field(Memory, "hotplug_size", Number(0)),
            Field(Memory, "hotplugged_size", Number(0)),
        ],
    ),
    missing("reserving swap space is", &[Key("--memory", "reserve"), Field(Memory, "reserve", Is(false))]),
    missing("memory zones are", &[Flag("--memory-zone"), Field(Memory, "zones", Empty), Endpoint("vm.resize-zone")]),
    missing("NUMA nodes are", &[Flag("--numa"), Field(Vm, "numa", Empty)]),
    missing("SGX enclaves are", &[Field(Vm, "sgx_epc", Empty)]),
    // What is booted, and the platform.
    missing("booting from firmware is", &[Flag("--firmware"), Field(Payload, "firmware", Null)]),
    missing("booting from an IGVM file is", &[Flag("--igvm"), Field(Payload, "igvm", Null)]),
    missing("host data for confidential VMs is", &[Field(Payload, "host_data", Null)]),
    missing("confidential VMs are", &[Field(Platform, "tdx", Is(false)), Field(Platform, "sev_snp", Is(false))]),
    missing("platform settings are", &[Flag("--platform"), Field(Vm, "platform", Harmless::Object(Platform))]),
    missing(
        "SMBIOS strings are",
        &[
            Field(Platform, "serial_number", Null),
            Field(Platform, "uuid", Null),
            Field(Platform, "oem_strings", Empty),
            Field(Platform, "system_manufacturer", Null),
            Field(Platform, "system_product_name", Null),
            Field(Platform, "system_version", Null),
            Field(Platform, "system_serial_number", Null),
            Field(Platform, "system_uuid", Null),
            Field(Platform, "system_sku_number", Null),
            Field(Platform, "system_family", Null),
            Field(Platform, "chassis_asset_tag", Null),
        ],
    ),
    // The program.
    missing("debugging with gdb is", &[Flag("--gdb"), Field(Vm, "gdb", Is(false))]),
    missing(
        "Landlock rules are",
        &[
            Flag("--landlock"),
            Flag("--landlock-rules"),
            Field(Vm, "landlock_enable", Is(false)),
            Field(Vm, "landlock_rules", Empty),
        ],
    ),
    missing("system call filters are", &[Flag("--seccomp")]),
    missing("choosing the log format is", &[Flag("--log-format")]),
    missing("snapshots are", &[Flag("--restore"), Endpoint("vm.snapshot"), Endpoint("vm.restore")]),
    missing("live migration is", &[Endpoint("vm.send-migration"), Endpoint("vm.receive-migration")]),
    missing("guest core dumps are", &[Endpoint("vm.coredump")]),
];

/// Whether this is the topology that guests have here anyway: cores of one thread each, in one package.
fn is_own_topology(topology: &Value, cpus: &Map<String, Value>) -> bool {
    let vcpus = cpus.get("max_vcpus").or(cpus.get("boot_vcpus")).and_then(Value::as_u64).unwrap_or(1);
    let own = [("threads_per_core", 1), ("cores_per_die", vcpus), ("dies_per_package", 1), ("packages", 1)];
    let is_own = |(name, value): (&String, &Value)| {
        own.iter().any(|(own_name, own_value)| own_name == name && value.as_u64() == Some(*own_value))
    };
    topology.as_object().is_some_and(|topology| topology.iter().all(is_own))
}

fn places() -> impl Iterator<Item = (&'static str, &'static Place)> {
    TABLE.iter().flat_map(|missing| missing.places.iter().map(|place| (missing.what, place)))
}

/// What an option of the command line, such as `--vsock`, asks for, if that is not supported yet.
pub fn flag(option: &str) -> Option<&'static str> {
    places().find(|(_, place)| matches!(place, Flag(flag) if *flag == option)).map(|(what, _)| what)
}

/// All options of the command line that are not supported yet.
pub fn flags() -> impl Iterator<Item = &'static str> {
    places().filter_map(|(_, place)| match place {
        Flag(flag) => Some(*flag),
        _ => None,
    })
}

/// What a key of an option asks for, if that is not supported yet.
pub fn key(option: &str, key: &str) -> Option<&'static str> {
    places().find(|(_, place)| matches!(place, Key(o, k) if *o == option && *k == key)).map(|(what, _)| what)
}

/// What an endpoint of the API, such as `vm.snapshot`, does, if that is not supported yet.
pub fn endpoint(name: &str) -> Option<&'static str> {
    places().find(|(_, place)| matches!(place, Endpoint(endpoint) if *endpoint == name)).map(|(what, _)| what)
}

/// All endpoints of the API that are not supported yet.
pub fn endpoints() -> impl Iterator<Item = &'static str> {
    places().filter_map(|(_, place)| match place {
        Endpoint(endpoint) => Some(*endpoint),
        _ => None,
    })
}

impl Object {
    /// The fields of this object that are not supported yet.
    pub fn fields(self) -> impl Iterator<Item = &'static str> {
        self.missing().map(|(_, field, _)| field)
    }

    fn missing(self) -> impl Iterator<Item = (&'static str, &'static str, &'static Harmless)> {
        places().filter_map(move |(what, place)| match place {
            Field(object, field, harmless) if *object == self => Some((what, *field, harmless)),
            _ => None,
        })
    }

    /// The supported fields that are such objects, or arrays of them.
    const fn objects(self) -> &'static [(&'static str, Self)] {
        match self {
            Vm => &[
                ("net", Self::Whole),
                ("vdpa", Self::Whole),
                ("rng", Self::Whole),
                ("cpus", Cpus),
                ("memory", Memory),
                ("payload", Payload),
                ("serial", Console),
                ("console", Console),
                ("disks", Disk),
            ],
            _ => &[],
        }
    }

    /// Removes the unsupported fields from `value`, which is at `path` of the document (empty for its root).
    ///
    /// What is not an object is left as it is, for the typed configuration to refuse.
    ///
    /// # Errors
    ///
    /// One of those fields asks for something.
    pub fn strip(self, value: &mut Value, path: &str) -> Result<(), ConfigError> {
        let Some(fields) = value.as_object_mut() else { return Ok(()) };
        for (what, field, harmless) in self.missing() {
            let Some(value) = fields.remove(field) else { continue };
            harmless.check(value, fields, &join(path, field), what)?;
        }
        for (field, object) in self.objects() {
            let path = join(path, field);
            match fields.get_mut(*field) {
                // As if it were left out.
                Some(Value::Null) => _ = fields.remove(*field),
                Some(Value::Array(elements)) => {
                    for (index, element) in elements.iter_mut().enumerate() {
                        object.strip(element, &format!("{path}[{index}]"))?;
                    }
                }
                Some(value) => object.strip(value, &path)?,
                None => {}
            }
        }
        Ok(())
    }

    /// Checks an object that is not supported as a whole.
    fn check_nothing_else(self, value: &mut Value, path: &str, what: &str) -> Result<(), ConfigError> {
        self.strip(value, path)?;
        let Some(rest) = value.as_object() else { return Err(not_yet(path, what)) };
        match rest.keys().next() {
            Some(unknown) => {
                let what = "unknown field; the API's description lists the known ones".to_string();
                Err(ConfigError::new(join(path, unknown), Problem::Syntax(what)))
            }
            None => Ok(()),
        }
    }
}

impl Harmless {
    fn check(
        &self,
        mut value: Value,
        siblings: &Map<String, Value>,
        path: &str,
        what: &str,
    ) -> Result<(), ConfigError> {
        let harmless = match (self, &value) {
            (_, Value::Null) => true,
            (Null, _) => false,
            (Is(default), value) => value.as_bool() == Some(*default),
            (Number(default), value) => value.as_u64() == Some(*default),
            (Numbers(first, last), value) => value.as_u64().is_some_and(|n| (*first..=*last).contains(&n)),
            (Text(defaults), value) => value.as_str().is_some_and(|text| defaults.contains(&text)),
            (Empty, Value::Array(elements)) => elements.is_empty(),
            (Empty, Value::Object(fields)) => fields.is_empty(),
            (Empty, _) => false,
            (If(harmless), value) => harmless(value, siblings),
            (Self::Object(object), _) => return object.check_nothing_else(&mut value, path, what),
        };
        if harmless { Ok(()) } else { Err(not_yet(path, what)) }
    }
}

fn not_yet(path: &str, what: &str) -> ConfigError {
    ConfigError::new(path, Problem::NotYet { what: what.to_string(), remedy: "leave it out".to_string() })
}

fn join(path: &str, field: &str) -> String {
    if path.is_empty() { field.to_string() } else { format!("{path}.{field}") }
}

#[cfg(test)]
mod tests;
