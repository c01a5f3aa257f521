//! Names of devices.

use std::collections::HashSet;

use crate::config::error::Problem;

/// The longest name, in characters.
pub const LONGEST: usize = 255;

/// Checks that a device can have this name.
///
/// # Errors
///
/// Fails with the fault of the name.
pub fn check_id(id: &str) -> Result<(), Problem> {
    if id.is_empty() || id.starts_with("__") || id.chars().any(char::is_control) {
        let what = "not a device name; use printable characters, and do not start with two underscores".to_string();
        return Err(Problem::Value(what));
    }
    if id.chars().any(char::is_whitespace) {
        return Err(Problem::Value("a device name has no blanks; leave them out, or write - or _".to_string()));
    }
    let length = id.chars().count();
    if length > LONGEST {
        let what = format!("a name of {length} characters; give at most {LONGEST}");
        return Err(Problem::Value(what));
    }
    Ok(())
}

/// The ids of a VM's devices by kind, in the order of the configuration: the given ones, and for other devices the
/// prefix of the kind with a number that is unique among all devices, as in Cloud Hypervisor: `_disk0`, `_disk1`,
/// `_net2`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ids {
    /// Disks.
    pub disks: Vec<String>,
    /// NICs of `--net`.
    pub net: Vec<String>,
    /// Shared file systems.
    pub fs: Vec<String>,
    /// vhost-user devices of any type.
    pub generic_vhost_user: Vec<String>,
    /// Persistent memory.
    pub pmem: Vec<String>,
    /// The socket device.
    pub vsock: Vec<String>,
    /// NICs of `--vdpa`.
    pub vdpa: Vec<String>,
    /// Devices of the host.
    pub devices: Vec<String>,
}

impl Ids {
    /// The prefixes of the kinds, in the order of the fields, which is the order of numbering.
    const PREFIXES: [&str; 8] = ["_disk", "_net", "_fs", "_generic_vhost_user", "_pmem", "_vsock", "_vdpa", "_vfio"];

    /// Chooses the ids of devices with these given ids, by kind in the order of the fields. Given ids are not checked.
    pub(super) fn choose(given: [Vec<Option<&str>>; 8]) -> Self {
        let numbers = given.iter().flatten().flatten().filter_map(|id| number_of(id));
        let used: HashSet<u32> = numbers.collect();
        let mut free = (0..).filter(|number| !used.contains(number));
        let mut index = 0;
        let [disks, net, fs, generic_vhost_user, pmem, vsock, vdpa, devices] = given.map(|given| {
            let prefix = Self::PREFIXES[index];
            index += 1;
            let mut numbered = || free.next().map(|number| format!("{prefix}{number}")).unwrap_or_default();
            given.into_iter().map(|id| id.map_or_else(&mut numbered, str::to_string)).collect()
        });
        Self { disks, net, fs, generic_vhost_user, pmem, vsock, vdpa, devices }
    }

    /// The kinds of which a VM may have several: the option, the field of the configuration, and the ids.
    pub fn lists(self) -> [(&'static str, &'static str, Vec<String>); 7] {
        let Self { disks, net, fs, generic_vhost_user, pmem, vsock: _, vdpa, devices } = self;
        [
            ("--disk", "disks", disks),
            ("--net", "net", net),
            ("--fs", "fs", fs),
            ("--generic-vhost-user", "generic_vhost_user", generic_vhost_user),
            ("--pmem", "pmem", pmem),
            ("--vdpa", "vdpa", vdpa),
            ("--device", "devices", devices),
        ]
    }
}

/// The number of an id of the form that this program chooses.
fn number_of(id: &str) -> Option<u32> {
    let number = Ids::PREFIXES.iter().find_map(|prefix| id.strip_prefix(prefix))?;
    number.parse().ok()
}
