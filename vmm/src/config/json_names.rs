//! Names of settings for a client that has sent JSON: paths in its document instead of command-line options.

use std::path::Path;

use vm_api::config::error::ConfigError;
use vm_api::config::{NetConfig, VfConfig, VfRange, VmConfig};

/// The error with its subject as a path in the document that `config` was read from, if the subject is found there.
pub(crate) fn in_document(error: ConfigError, config: &VmConfig) -> ConfigError {
    match Named::of(&error.subject, config) {
        Some(named) => ConfigError { subject: named.to_string(), ..error },
        None => error,
    }
}

/// As [`in_document`] for a document that describes one device: the last of its kind in `config`. An error about
/// another device keeps its name.
pub(crate) fn in_device(error: ConfigError, config: &VmConfig) -> ConfigError {
    match Named::of(&error.subject, config).and_then(|named| named.in_last(config)) {
        Some(subject) => ConfigError { subject, ..error },
        None => error,
    }
}

/// A place in a VM's document.
struct Named<'a> {
    /// The field of the VM.
    field: &'static str,
    /// The element, if the field is a list.
    index: Option<usize>,
    /// The VF's element, if it is one.
    vf: Option<usize>,
    /// The name by which it was found: `id=a`.
    found: Option<&'a str>,
    /// Rest of the subject: `num_queues=3`.
    rest: &'a str,
}

impl<'a> Named<'a> {
    /// The place that a subject such as `--net id=pf0,num_queues=3` names.
    fn of(subject: &'a str, config: &VmConfig) -> Option<Self> {
        let (option, rest) = subject.split_once(' ').unwrap_or((subject, ""));
        if option == "--net-vf" {
            return Self::vf(rest, config);
        }
        if let Some((field, key)) = list(option, config) {
            let (found, rest, index) = element(rest, &key)?;
            return Some(Self { field, index: Some(index), vf: None, found, rest });
        }
        Some(Self { field: object(option)?, index: None, vf: None, found: None, rest })
    }

    /// A VF: `pf=pf0,index=3,vlan=7`. One without settings of its own has those of its PF.
    fn vf(rest: &'a str, config: &VmConfig) -> Option<Self> {
        let (pf, rest) = rest.strip_prefix("pf=")?.split_once(",index=")?;
        let (index, rest) = rest.split_once(',').unwrap_or((rest, ""));
        let place = config.ids().of::<NetConfig>().iter().rposition(|id| id == pf)?;
        // Of several entries for the VF, the last overrides the others.
        let range = index.parse::<VfRange>().ok()?;
        let is_it = |vf: &VfConfig| vf.index == range || range.one().is_some_and(|index| vf.index.covers(index));
        let vf = config.net.get(place)?.vfs.iter().rposition(is_it);
        Some(Self { field: "net", index: Some(place), vf, found: None, rest })
    }

    /// The path below the last element of its list.
    fn in_last(&self, config: &VmConfig) -> Option<String> {
        if self.field == "vsock" {
            return self.to_string().split_once('.').map(|(_, below)| below.to_string());
        }
        let (.., ids) = config.ids().lists().find(|(_, field, _)| *field == self.field)?;
        if self.index? + 1 != ids.len() {
            return None;
        }
        let whole = self.to_string();
        match whole.split_once("].").map(|(_, below)| below) {
            Some(below) => Some(below.to_string()),
            None if self.rest.is_empty() => self.found.map(str::to_string),
            None => Some(self.rest.to_string()),
        }
    }
}

impl std::fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.field)?;
        self.index.map_or(Ok(()), |index| write!(f, "[{index}]"))?;
        self.vf.map_or(Ok(()), |vf| write!(f, ".vfs[{vf}]"))?;
        match self.rest.split_once('=') {
            _ if self.rest.is_empty() => self.found.map_or(Ok(()), |found| write!(f, " ({found})")),
            Some((key, value)) if is_key(key) && !has_more(value) => {
                write!(f, ".{}={value}", json_key(self.field, key))
            }
            _ => write!(f, " ({})", self.rest),
        }
    }
}

/// True if `text` is the name of a key.
fn is_key(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}

/// True if another key follows the value.
fn has_more(value: &str) -> bool {
    value.rsplit_once('=').is_some_and(|(before, _)| before.rsplit_once(',').is_some_and(|(_, key)| is_key(key)))
}

/// The field of an option that may be given several times, and the key and value that identify each element.
fn list(option: &str, config: &VmConfig) -> Option<(&'static str, Elements)> {
    let by_id = |ids: Vec<String>| Elements { key: "id", ids };
    if let Some((_, field, ids)) = config.ids().lists().find(|(flag, ..)| *flag == option) {
        return Some((field, by_id(ids)));
    }
    Some(match option {
        "--rate-limit-group" => {
            ("rate_limit_groups", by_id(config.rate_limit_groups.iter().map(|group| group.id.clone()).collect()))
        }
        "--memory-zone" => ("memory.zones", by_id(config.memory.zones.iter().map(|zone| zone.id.clone()).collect())),
        "--numa" => {
            let ids = config.numa.iter().map(|node| node.guest_numa_id.to_string()).collect();
            ("numa", Elements { key: "guest_numa_id", ids })
        }
        "--pci-segment" => {
            let ids = config.pci_segments.iter().map(|segment| segment.pci_segment.to_string()).collect();
            ("pci_segments", Elements { key: "pci_segment", ids })
        }
        "--landlock-rules" => {
            let path = |path: &Path| path.display().to_string();
            (
                "landlock_rules",
                Elements { key: "path", ids: config.landlock_rules.iter().map(|rule| path(&rule.path)).collect() },
            )
        }
        _ => return None,
    })
}

/// The elements of a list.
struct Elements {
    /// The key that identifies an element.
    key: &'static str,
    ids: Vec<String>,
}

/// The element that a subject names without its option: the identifying text, the rest, and the index.
fn element<'a>(rest: &'a str, elements: &Elements) -> Option<(Option<&'a str>, &'a str, usize)> {
    if let Some(value) = rest.strip_prefix(elements.key).and_then(|rest| rest.strip_prefix('=')) {
        // A name may contain commas.
        let ends = value.match_indices(',').map(|(end, _)| end).chain([value.len()]);
        for end in ends {
            let (id, after) = value.split_at_checked(end)?;
            // Of two elements with one name, the later is at fault.
            if let Some(index) = elements.ids.iter().rposition(|other| other == id) {
                let found = rest.get(..elements.key.len() + 1 + end);
                return Some((found, after.trim_start_matches(','), index));
            }
        }
        return None;
    }
    if let Some((number, rest)) = rest.strip_prefix("number ").map(|rest| rest.split_once(", ").unwrap_or((rest, ""))) {
        return Some((None, rest, number.parse::<usize>().ok()?.checked_sub(1)?));
    }
    (elements.ids.len() == 1).then_some((None, rest, 0))
}

/// The field of an option that is given once.
fn object(option: &str) -> Option<&'static str> {
    Some(match option {
        "--cpus" => "cpus",
        "--memory" => "memory",
        "--platform" => "platform",
        "--rng" => "rng",
        "--rtc" => "rtc",
        "--tpm" => "tpm",
        "--balloon" => "balloon",
        "--vsock" => "vsock",
        "--console" => "console",
        "--serial" => "serial",
        "--debug-console" => "debug_console",
        "--kernel" => "payload.kernel",
        "--firmware" => "payload.firmware",
        "--cmdline" => "payload.cmdline",
        "--initramfs" => "payload.initramfs",
        _ => return None,
    })
}

/// The field of a key.
fn json_key<'a>(field: &str, key: &'a str) -> &'a str {
    match (field, key) {
        ("cpus", "boot") => "boot_vcpus",
        ("cpus", "max") => "max_vcpus",
        ("net" | "disks", "socket") => "vhost_socket",
        ("net", "fd") => "fds",
        ("platform", "iommu_address_width") => "iommu_address_width_bits",
        (_, "bw_size") => "rate_limiter_config.bandwidth.size",
        (_, "bw_one_time_burst") => "rate_limiter_config.bandwidth.one_time_burst",
        (_, "bw_refill_time") => "rate_limiter_config.bandwidth.refill_time",
        (_, "ops_size") => "rate_limiter_config.ops.size",
        (_, "ops_one_time_burst") => "rate_limiter_config.ops.one_time_burst",
        (_, "ops_refill_time") => "rate_limiter_config.ops.refill_time",
        _ => key,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use vm_api::config::error::Problem;

    use super::*;

    fn config() -> VmConfig {
        let text = json!({
            "payload": {}, "cpus": {"boot_vcpus": 4},
            "net": [{}, {"id": "a,b"}, {"id": "pf0", "sriov_vfs": 4, "vfs": [{"index": 2}, {"index": 1}]}],
            "disks": [{"path": "/d"}], "memory": {"size": 0, "zones": [{"id": "y", "size": 1}, {"id": "z", "size": 1}]},
            "numa": [{"guest_numa_id": 1}, {"guest_numa_id": 0}],
            "landlock_rules": [{"path": "/a", "access": "r"}, {"path": "/b", "access": "r"}],
        });
        VmConfig::from_json(text.to_string().as_bytes()).unwrap()
    }

    fn error(subject: &str) -> ConfigError {
        ConfigError::new(subject, Problem::Value(String::new()))
    }

    #[test]
    fn a_subject_is_a_path_of_the_document() {
        for (subject, path) in [
            ("--net id=_net1,num_queues=3", "net[0].num_queues=3"),
            ("--net id=a,b,socket=/s", "net[1].vhost_socket=/s"),
            ("--net id=pf0", "net[2] (id=pf0)"),
            ("--net number 1, mtu=3", "net[0].mtu=3"),
            ("--net-vf pf=pf0,index=1,vlan=5000", "net[2].vfs[1].vlan=5000"),
            ("--net-vf pf=pf0,index=3,fd=9", "net[2].fds=9"),
            ("--net-vf pf=pf0,index=2", "net[2].vfs[0]"),
            ("--disk ops_size=0", "disks[0].rate_limiter_config.ops.size=0"),
            ("--disk queue_affinity=[3@...]", "disks[0].queue_affinity=[3@...]"),
            ("--cpus boot=300", "cpus.boot_vcpus=300"),
            ("--cpus boot=4,max=3", "cpus (boot=4,max=3)"),
            ("--memory size=1G", "memory.size=1G"),
            ("--memory-zone id=z,size=0", "memory.zones[1].size=0"),
            ("--numa guest_numa_id=0,distances=[1@10]", "numa[1].distances=[1@10]"),
            ("--landlock-rules path=/b,access=r", "landlock_rules[1].access=r"),
            ("--kernel /k", "payload.kernel (/k)"),
            ("--serial null,id=c", "serial (null,id=c)"),
            ("--platform iommu_address_width=9", "platform.iommu_address_width_bits=9"),
        ] {
            assert_eq!(in_document(error(subject), &config()).subject, path);
        }
        for subject in
            ["payload", "--net id=none,mtu=1", "--net-vf pf=none,index=1", "--net (32 of them)", "--x y=1", ""]
        {
            assert_eq!(in_document(error(subject), &config()).subject, subject);
        }
    }

    #[test]
    fn a_device_that_is_added_has_paths_of_its_own_document() {
        for (subject, path) in [
            ("--net id=pf0,num_queues=3", "num_queues=3"),
            ("--net id=pf0", "id=pf0"),
            ("--net-vf pf=pf0,index=1,vlan=5000", "vfs[1].vlan=5000"),
            ("--disk path=/d", "path=/d"),
            ("--net id=pf0,mtu=3,tap=x", "mtu=3,tap=x"),
            ("--net id=a,b,mtu=3", "--net id=a,b,mtu=3"),
            ("--cpus boot=3", "--cpus boot=3"),
        ] {
            assert_eq!(in_device(error(subject), &config()).subject, path);
        }
    }
}
