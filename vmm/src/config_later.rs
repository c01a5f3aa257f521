//! What Cloud Hypervisor's JSON has and this version has not.
//!
//! A client may send such a field at its default, as generated clients do; it is taken out before the document becomes a typed
//! configuration. Any other value is refused, and never ignored. Fields that nobody knows stay in, and the typed configuration
//! refuses them.

use serde_json::{Map, Value};

use crate::config_error::{ConfigError, Problem};

/// A JSON object of Cloud Hypervisor's, as far as there is something to take out of it.
#[derive(Debug)]
pub(crate) struct Object {
    /// Its fields that this version has not.
    later: &'static [Later],
    /// Its fields that this version has, and that are such objects, or arrays of them.
    objects: &'static [(&'static str, &'static Object)],
}

/// A field that this version has not.
#[derive(Debug)]
struct Later {
    field: &'static str,
    /// The values that ask for nothing. Null always does not.
    harmless: Harmless,
    /// What it would ask for, with its verb: `rate limits are`.
    what: &'static str,
}

/// The values of a field that ask for nothing.
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
    /// An object without a field that asks for something, and without unknown ones.
    Object(&'static Object),
    /// What the function says, which is given the object that has the field, too.
    If(fn(&Value, &Map<String, Value>) -> bool),
}

const fn later(field: &'static str, harmless: Harmless, what: &'static str) -> Later {
    Later { field, harmless, what }
}

/// `VmConfig`.
pub(crate) const VM: Object = Object {
    later: &[
        later("rate_limit_groups", Harmless::Empty, "groups of rate limits are"),
        later("balloon", Harmless::Null, "balloons are"),
        later("fs", Harmless::Empty, "shared file systems are"),
        later("generic-vhost-user", Harmless::Empty, "generic vhost-user devices are"),
        later("generic_vhost_user", Harmless::Empty, "generic vhost-user devices are"),
        later("pmem", Harmless::Empty, "persistent memory devices are"),
        later("debug_console", Harmless::Object(&DEBUG_CONSOLE), "debug consoles are"),
        later("devices", Harmless::Empty, "VFIO devices are"),
        later("user_devices", Harmless::Empty, "vfio-user devices are"),
        later("vsock", Harmless::Null, "vsock devices are"),
        later("numa", Harmless::Empty, "NUMA nodes are"),
        later("iommu", Harmless::Is(false), "virtual IOMMUs are"),
        later("watchdog", Harmless::Is(false), "watchdogs are"),
        later("pvpanic", Harmless::Is(false), "pvpanic devices are"),
        later("pci_segments", Harmless::Empty, "further PCI segments are"),
        later("platform", Harmless::Object(&PLATFORM), "platform settings are"),
        later("tpm", Harmless::Null, "TPMs are"),
        later("gdb", Harmless::Is(false), "gdb stubs are"),
        later("pvmemcontrol", Harmless::Null, "pvmemcontrol devices are"),
        later("ivshmem", Harmless::Null, "ivshmem devices are"),
        later("fw_cfg_config", Harmless::Null, "fw_cfg devices are"),
        later("sgx_epc", Harmless::Empty, "SGX enclaves are"),
        later("landlock_enable", Harmless::Is(false), "Landlock rules are"),
        later("landlock_rules", Harmless::Empty, "Landlock rules are"),
    ],
    objects: &[
        ("net", &WHOLE),
        ("vdpa", &WHOLE),
        ("rng", &WHOLE),
        ("cpus", &CPUS),
        ("memory", &MEMORY),
        ("payload", &PAYLOAD),
        ("serial", &CONSOLE),
        ("console", &CONSOLE),
        ("disks", &DISK),
        ("rng", &RNG),
    ],
};

/// `CpusConfig`.
pub(crate) const CPUS: Object = Object {
    later: &[
        later("topology", Harmless::If(is_own_topology), "CPU topologies are"),
        later("kvm_hyperv", Harmless::Is(false), "Hyper-V enlightenments are"),
        later("max_phys_bits", Harmless::Number(46), "a limit of the physical address width is"),
        later("affinity", Harmless::Empty, "pinning of vCPUs is"),
        later("features", Harmless::Object(&CPU_FEATURES), "additional CPU features are"),
        later("nested", Harmless::Is(true), "a choice of nested virtualisation is"),
        later("core_scheduling", Harmless::Text(&["Vm"]), "core scheduling is"),
        later("profile", Harmless::Text(&["host", "Host"]), "CPU profiles are"),
    ],
    objects: &[],
};

pub(crate) const CPU_FEATURES: Object =
    Object { later: &[later("amx", Harmless::Is(false), "additional CPU features are")], objects: &[] };

/// Whether this is the topology that guests have here anyway: cores of one thread each, in one package.
fn is_own_topology(topology: &Value, cpus: &Map<String, Value>) -> bool {
    let vcpus = cpus.get("max_vcpus").or(cpus.get("boot_vcpus")).and_then(Value::as_u64).unwrap_or(1);
    let own = [("threads_per_core", 1), ("cores_per_die", vcpus), ("dies_per_package", 1), ("packages", 1)];
    let is_own = |(name, value): (&String, &Value)| {
        own.iter().any(|(own_name, own_value)| own_name == name && value.as_u64() == Some(*own_value))
    };
    topology.as_object().is_some_and(|topology| topology.iter().all(is_own))
}

/// `MemoryConfig`.
pub(crate) const MEMORY: Object = Object {
    later: &[
        later("mergeable", Harmless::Is(false), "merging of equal pages is"),
        later("hotplug_method", Harmless::Text(&["Acpi"]), "virtio-mem is"),
        later("hotplug_size", Harmless::Number(0), "hot-plugged memory is"),
        later("hotplugged_size", Harmless::Number(0), "hot-plugged memory is"),
        later("reserve", Harmless::Is(false), "reserving swap space is"),
        later("zones", Harmless::Empty, "memory zones are"),
    ],
    objects: &[],
};

/// `PayloadConfig`.
pub(crate) const PAYLOAD: Object = Object {
    later: &[
        later("firmware", Harmless::Null, "firmware is"),
        later("igvm", Harmless::Null, "IGVM files are"),
        later("host_data", Harmless::Null, "host data for confidential VMs is"),
    ],
    objects: &[],
};

/// `ConsoleConfig` and `SerialConfig`: where a virtio console is, which a serial port is not.
pub(crate) const CONSOLE: Object = Object {
    later: &[
        later("id", Harmless::Null, "names of consoles are"),
        later("iommu", Harmless::Is(false), "virtual IOMMUs are"),
        later("pci_segment", Harmless::Number(0), "further PCI segments are"),
        later("pci_device_id", Harmless::Null, "a choice of the console's slot is"),
    ],
    objects: &[],
};

pub(crate) const DEBUG_CONSOLE: Object = Object {
    later: &[
        later("mode", Harmless::Text(&["Off"]), "debug consoles are"),
        later("file", Harmless::Null, "debug consoles are"),
        later("iobase", Harmless::Number(0xe9), "debug consoles are"),
    ],
    objects: &[],
};

/// `RngConfig`.
const RNG: Object = Object { later: &[], objects: &[] };

/// `DiskConfig`.
pub(crate) const DISK: Object = Object {
    later: &[
        later("vhost_user", Harmless::Is(false), "disks behind vhost-user are"),
        later("vhost_socket", Harmless::Null, "disks behind vhost-user are"),
        later("rate_limit_group", Harmless::Null, "groups of rate limits are"),
        later("queue_affinity", Harmless::Empty, "pinning of queues is"),
        later("backing_files", Harmless::Is(false), "images with backing files are"),
        later("sparse", Harmless::Is(true), "a choice of sparse images is"),
        later("lock_granularity", Harmless::Text(&["ByteRange"]), "a choice of locks is"),
        later("disable_io_uring", Harmless::Is(false), "a choice of I/O engines is"),
        later("disable_aio", Harmless::Is(false), "a choice of I/O engines is"),
    ],
    objects: &[],
};

/// An object of which this version has all fields.
const WHOLE: Object = Object { later: &[], objects: &[] };

/// `PlatformConfig`. More segments than one change nothing as long as no device is put on one, and that is refused at the device:
/// Kata always asks for 2.
pub(crate) const PLATFORM: Object = Object {
    later: &[
        later("num_pci_segments", Harmless::Numbers(1, 96), "so many PCI segments are"),
        later("iommu_segments", Harmless::Empty, "virtual IOMMUs are"),
        later("iommu_address_width", Harmless::Number(64), "virtual IOMMUs are"),
        later("iommu_address_width_bits", Harmless::Number(64), "virtual IOMMUs are"),
        later("iommufd", Harmless::Is(false), "iommufd is"),
        later("iommufd_fd", Harmless::Null, "iommufd is"),
        later("vfio_p2p_dma", Harmless::Is(true), "a choice of DMA between devices is"),
        later("serial_number", Harmless::Null, "SMBIOS strings are"),
        later("uuid", Harmless::Null, "SMBIOS strings are"),
        later("oem_strings", Harmless::Empty, "SMBIOS strings are"),
        later("system_manufacturer", Harmless::Null, "SMBIOS strings are"),
        later("system_product_name", Harmless::Null, "SMBIOS strings are"),
        later("system_version", Harmless::Null, "SMBIOS strings are"),
        later("system_serial_number", Harmless::Null, "SMBIOS strings are"),
        later("system_uuid", Harmless::Null, "SMBIOS strings are"),
        later("system_sku_number", Harmless::Null, "SMBIOS strings are"),
        later("system_family", Harmless::Null, "SMBIOS strings are"),
        later("chassis_asset_tag", Harmless::Null, "SMBIOS strings are"),
        later("tdx", Harmless::Is(false), "confidential VMs are"),
        later("sev_snp", Harmless::Is(false), "confidential VMs are"),
    ],
    objects: &[],
};

impl Object {
    /// The fields that this version has not.
    #[cfg(test)]
    pub fn fields(&self) -> impl Iterator<Item = &'static str> {
        self.later.iter().map(|later| later.field)
    }

    /// Takes the fields that this version has not out of `value`, which is at `path` of the document (empty for its root).
    ///
    /// What is no object is left as it is, for the typed configuration to refuse.
    ///
    /// # Errors
    ///
    /// One of those fields asks for something.
    pub fn strip(&self, value: &mut Value, path: &str) -> Result<(), ConfigError> {
        let Some(fields) = value.as_object_mut() else { return Ok(()) };
        for later in self.later {
            let Some(value) = fields.remove(later.field) else { continue };
            later.check(value, fields, &join(path, later.field))?;
        }
        for (field, object) in self.objects {
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
}

impl Later {
    fn check(&self, mut value: Value, siblings: &Map<String, Value>, path: &str) -> Result<(), ConfigError> {
        let harmless = match (&self.harmless, &value) {
            (_, Value::Null) => true,
            (Harmless::Null, _) => false,
            (Harmless::Is(default), value) => value.as_bool() == Some(*default),
            (Harmless::Number(default), value) => value.as_u64() == Some(*default),
            (Harmless::Numbers(first, last), value) => value.as_u64().is_some_and(|n| (*first..=*last).contains(&n)),
            (Harmless::Text(defaults), value) => value.as_str().is_some_and(|text| defaults.contains(&text)),
            (Harmless::Empty, Value::Array(elements)) => elements.is_empty(),
            (Harmless::Empty, Value::Object(fields)) => fields.is_empty(),
            (Harmless::Empty, _) => false,
            (Harmless::If(harmless), value) => harmless(value, siblings),
            (Harmless::Object(object), _) => return object.check_nothing_else(&mut value, path, self.what),
        };
        if harmless { Ok(()) } else { Err(not_yet(path, self.what)) }
    }
}

impl Object {
    /// Checks an object of which this version has no field.
    fn check_nothing_else(&self, value: &mut Value, path: &str, what: &str) -> Result<(), ConfigError> {
        self.strip(value, path)?;
        let Some(rest) = value.as_object() else { return Err(not_yet(path, what)) };
        match rest.keys().next() {
            Some(unknown) => Err(ConfigError::new(
                join(path, unknown),
                Problem::Syntax("unknown field; the API's description lists those there are".to_string()),
            )),
            None => Ok(()),
        }
    }
}

fn not_yet(path: &str, what: &str) -> ConfigError {
    ConfigError::new(path, Problem::NotYet { what: what.to_string(), remedy: "leave it out".to_string() })
}

fn join(path: &str, field: &str) -> String {
    if path.is_empty() { field.to_string() } else { format!("{path}.{field}") }
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::json;

    use super::*;
    use crate::config::{ConsoleConfig, CpusConfig, DiskConfig, MemoryConfig, PayloadConfig, VmConfig};

    /// A field is in the table or in the typed configuration, and never in both: the table would refuse it for ever.
    fn assert_unknown<T: DeserializeOwned>(object: &Object) {
        for later in object.later {
            let error = serde_json::from_value::<T>(json!({later.field: null})).err();
            let text = error.map(|error| error.to_string()).unwrap_or_default();
            assert!(text.contains("unknown field"), "{} is not later any more; take it out of this table", later.field);
        }
    }

    #[test]
    fn what_is_later_is_not_there() {
        assert_unknown::<VmConfig>(&VM);
        assert_unknown::<CpusConfig>(&CPUS);
        assert_unknown::<MemoryConfig>(&MEMORY);
        assert_unknown::<PayloadConfig>(&PAYLOAD);
        assert_unknown::<ConsoleConfig>(&CONSOLE);
        assert_unknown::<DiskConfig>(&DISK);
    }

    fn strip(mut value: Value) -> Result<Value, String> {
        VM.strip(&mut value, "").map(|()| value).map_err(|error| error.to_string())
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
            (json!({"fs": [{"tag": "x"}]}), "fs: shared file systems are not in this version yet; leave it out"),
            (
                json!({"cpus": {"nested": false}}),
                "cpus.nested: a choice of nested virtualisation is not in this version yet; leave it out",
            ),
            (
                json!({"cpus": {"features": {"amx": true}}}),
                "cpus.features.amx: additional CPU features are not in this version yet; leave it out",
            ),
            (
                json!({"disks": [{}, {"lock_granularity": "Full"}]}),
                "disks[1].lock_granularity: a choice of locks is not in this version yet; leave it out",
            ),
            (
                json!({"platform": {"num_pci_segments": 97}}),
                "platform.num_pci_segments: so many PCI segments are not in this version yet; leave it out",
            ),
            (
                json!({"platform": {"colour": 1}}),
                "platform.colour: unknown field; the API's description lists those there are",
            ),
            (json!({"platform": 7}), "platform: platform settings are not in this version yet; leave it out"),
            (
                json!({"memory": {"hotplug_size": 1}}),
                "memory.hotplug_size: hot-plugged memory is not in this version yet; leave it out",
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
}
