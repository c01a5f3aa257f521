//! All features of Cloud Hypervisor that this version does not support yet, and those that users of SR-IOV NICs may
//! expect.
//!
//! To add support, remove the entry from this table, and add a field with the same name and default to the struct.
//! Nothing else needs to change on the command line, in JSON or in `vm.info`, which all use the struct if it has the
//! field, and otherwise this table.

use serde_json::{Map, Value};

use super::place::Harmless::{Empty, If, Null, NullByte, Word};
use super::place::Missing;
use super::place::Object::{Cpus, Device, Net, Payload, Platform, Vf, Vm};
use super::place::Place::{self, Endpoint, Field, Flag, Setting};

/// `image_type` of a disk, other than raw and qcow2.
pub const IMAGE_TYPE: &str = "image formats other than raw and qcow2 are";

/// Cloud Hypervisor has this field, and prints it, only in special builds.
fn is_false(value: &Value, _: &Map<String, Value>) -> bool {
    *value == Value::Bool(false)
}

const fn missing(what: &'static str, places: &'static [Place]) -> Missing {
    Missing { what, places }
}

/// All features that are not supported yet.
pub(super) const TABLE: &[Missing] = &[
    // Devices.
    missing("peer-to-peer cliques of GPUs are", &[Setting(Device, "x_nv_gpudirect_clique", NullByte)]),
    missing(
        "vfio-user devices are",
        &[Flag("--user-device"), Field(Vm, "user_devices", Empty("UserDeviceConfig")), Endpoint("vm.add-user-device")],
    ),
    missing("pvmemcontrol devices are", &[Flag("--pvmemcontrol"), Field(Vm, "pvmemcontrol", Null("object"))]),
    missing("ivshmem devices are", &[Flag("--ivshmem"), Field(Vm, "ivshmem", Null("object"))]),
    missing("fw_cfg devices are", &[Flag("--fw-cfg-config"), Field(Vm, "fw_cfg_config", Null("object"))]),
    // Disks and NICs.
    missing(IMAGE_TYPE, &[]),
    missing(
        "queries of receive side scaling, which no NIC has, are",
        &[Setting(Net, "query_rss", If(is_false)), Setting(Vf, "query_rss", If(is_false))],
    ),
    // vCPUs.
    missing("CPU profiles are", &[Setting(Cpus, "profile", Word("Host", "host"))]),
    // Memory.
    missing("SGX enclaves are", &[Field(Vm, "sgx_epc", Empty("object"))]),
    // Boot sources, and the platform.
    missing("booting from an IGVM file is", &[Flag("--igvm"), Field(Payload, "igvm", Null("string"))]),
    missing(
        "host data for confidential VMs is",
        // The second is Kata's, which always sends it as null.
        &[
            Flag("--host-data"),
            Field(Payload, "host_data", Null("string")),
            Field(Payload, "mrconfigid", Null("string")),
        ],
    ),
    missing(
        "confidential VMs are",
        &[Setting(Platform, "tdx", If(is_false)), Setting(Platform, "sev_snp", If(is_false))],
    ),
    // The program.
    missing("the D-Bus API is", &[Flag("--dbus-service-name"), Flag("--dbus-object-path"), Flag("--dbus-system-bus")]),
    missing("debugging with gdb is", &[Flag("--gdb"), Field(Vm, "gdb", If(is_false))]),
    missing("guest core dumps are", &[Endpoint("vm.coredump")]),
];
