//! The rules for the parts of a VM that are not devices of bus 0.

use vm_api::config::console::{ConsoleConfig, ConsoleMode};
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::unsupported::VIRTIO_MEM;
use vm_api::config::{HotplugMethod, MemoryConfig, MemoryZoneConfig, PayloadConfig, VmConfig, bytes};

use crate::config::cpus;

/// Checks them.
///
/// # Errors
///
/// The first thing that is wrong.
pub(crate) fn check(vm: &VmConfig) -> Result<(), ConfigError> {
    cpus::check(&vm.cpus)?;
    check_memory(&vm.memory)?;
    check_payload(&vm.payload)?;
    check_path("--serial", &vm.serial)?;
    check_serial(&vm.serial)?;
    check_console(&vm.console, &vm.serial)
}

/// The most memory: 46 bits of address, less what is above it.
const MOST_MEMORY: u64 = 1 << 45;
/// The unit of memory, in bytes: a page.
const PAGE: u64 = 4096;

/// Checks the guest's memory.
///
/// # Errors
///
/// The first thing that is wrong.
pub(crate) fn check_memory(memory: &MemoryConfig) -> Result<(), ConfigError> {
    let fail =
        |key: &str, value: u64, problem| Err(ConfigError::new(format!("--memory {key}={}", bytes(value)), problem));
    match memory.zones.as_slice() {
        [] => check_part(memory.size, memory.hugepages, memory.hugepage_size)
            .map_err(|(key, value, problem)| ConfigError::new(format!("--memory {key}={}", bytes(value)), problem))?,
        zones => check_zones(memory, zones)?,
    }
    if memory.hotplug_method == HotplugMethod::VirtioMem {
        let problem =
            Problem::NotYet { what: VIRTIO_MEM.to_string(), remedy: "give acpi, or leave it out".to_string() };
        return Err(ConfigError::new("--memory hotplug_method=virtio-mem", problem));
    }
    if let Some(room) = memory.room() {
        // With less, nothing can ever be added.
        if room < MemoryConfig::STEP {
            let what = format!("memory is added in steps of {}; give that or more", bytes(MemoryConfig::STEP));
            return fail("hotplug_size", room, Problem::Value(what));
        }
        if room > MOST_MEMORY.saturating_sub(memory.total()) {
            let what = format!("together with size more than a guest can address; give at most {}G", MOST_MEMORY >> 30);
            return fail("hotplug_size", room, Problem::Limit(what));
        }
    }
    Ok(())
}

/// Checks the size of memory and that of its pages. An error names the key and its value.
fn check_part(size: u64, hugepages: bool, hugepage_size: Option<u64>) -> Result<(), (&'static str, u64, Problem)> {
    if size == 0 {
        return Err(("size", 0, Problem::Value("a VM needs memory; give a size, such as 512M".to_string())));
    }
    if size > MOST_MEMORY {
        let what = format!("more than a guest can address; give at most {}G", MOST_MEMORY >> 30);
        return Err(("size", size, Problem::Limit(what)));
    }
    if let Some(page) = hugepage_size {
        if !hugepages {
            return Err(("hugepage_size", page, Problem::Missing("needs hugepages=on; add it".to_string())));
        }
        if !page.is_power_of_two() || page <= PAGE {
            let what = "not a huge page size; give 2M or 1G".to_string();
            return Err(("hugepage_size", page, Problem::Value(what)));
        }
    }
    let page = hugepage_size.unwrap_or(PAGE);
    if !size.is_multiple_of(page) {
        let what = format!("not a multiple of the page size, {}; round it up", bytes(page));
        return Err(("size", size, Problem::Conflict(what)));
    }
    Ok(())
}

/// The most zones. A backend that takes no single regions takes 8, and one zone may lie on both sides of the hole.
const MOST_ZONES: usize = 7;
/// The most NUMA nodes of a host, as Linux counts them.
const MOST_NODES: u32 = 1024;

/// Checks memory that consists of zones.
fn check_zones(memory: &MemoryConfig, zones: &[MemoryZoneConfig]) -> Result<(), ConfigError> {
    let MemoryConfig { size, shared, hugepages, hugepage_size, prefault, mergeable, reserve, .. } = memory;
    let fail = |what: String, problem| Err(ConfigError::new(what, problem));
    if *size != 0 {
        let what = "the zones (--memory-zone) have all of the memory; give size=0".to_string();
        return fail(format!("--memory size={}", bytes(*size)), Problem::Conflict(what));
    }
    if *shared || *hugepages || hugepage_size.is_some() || *prefault || *mergeable || *reserve {
        let what = "the zones have properties of their own; give these to each --memory-zone".to_string();
        return fail(format!("--memory {memory}"), Problem::Conflict(what));
    }
    if let Some(room) = memory.room() {
        let what = "memory that consists of zones cannot be added to; leave it out".to_string();
        return fail(format!("--memory hotplug_size={}", bytes(room)), Problem::Conflict(what));
    }
    if zones.len() > MOST_ZONES {
        let what = format!("a VM has at most {MOST_ZONES} memory zones; give fewer");
        return fail(format!("--memory-zone: {} zones", zones.len()), Problem::Limit(what));
    }
    for (n, zone) in zones.iter().enumerate() {
        let option = format!("--memory-zone id={}", zone.id);
        if zone.id.is_empty() {
            return fail(option, Problem::Value("a zone needs a name; give one".to_string()));
        }
        if zones.iter().take(n).any(|other| other.id == zone.id) {
            return fail(option, Problem::Conflict("another zone has this name; give each its own".to_string()));
        }
        check_part(zone.size, zone.hugepages, zone.hugepage_size)
            .map_err(|(key, value, problem)| ConfigError::new(format!("{option},{key}={}", bytes(value)), problem))?;
        if zone.file.is_some() && zone.hugepages {
            let what = "a file has its own pages; leave hugepages out, or give a file of a hugetlbfs".to_string();
            return fail(format!("{option},hugepages=on"), Problem::Conflict(what));
        }
        if let Some(node) = zone.host_numa_node.filter(|node| *node >= MOST_NODES) {
            let what = format!("a host has at most {MOST_NODES} NUMA nodes; give one that it has");
            return fail(format!("{option},host_numa_node={node}"), Problem::Limit(what));
        }
    }
    if memory.total() > MOST_MEMORY {
        let what = format!("together more than a guest can address; give at most {}G", MOST_MEMORY >> 30);
        return fail("--memory-zone".to_string(), Problem::Limit(what));
    }
    Ok(())
}

fn check_payload(payload: &PayloadConfig) -> Result<(), ConfigError> {
    if let (Some(firmware), Some(kernel)) = (&payload.firmware, &payload.kernel) {
        let what = format!("a VM boots either firmware or a kernel (--kernel {}); leave one out", kernel.display());
        return Err(ConfigError::new(format!("--firmware {}", firmware.display()), Problem::Conflict(what)));
    }
    if let Some(cmdline) = payload.cmdline.as_ref().filter(|cmdline| cmdline.contains('\0')) {
        let what = "a kernel command line ends at a NUL character; remove it".to_string();
        return Err(ConfigError::new(format!("--cmdline {cmdline}"), Problem::Value(what)));
    }
    Ok(())
}

/// The serial port is no PCI device.
fn check_serial(serial: &ConsoleConfig) -> Result<(), ConfigError> {
    let ConsoleConfig { id, pci_segment, pci_device_id, iommu, .. } = serial;
    let settings = [
        ("id", id.is_some()),
        ("pci_segment", *pci_segment != 0),
        ("pci_device_id", pci_device_id.is_some()),
        ("iommu", *iommu),
    ];
    match settings.iter().find(|(_, given)| *given) {
        Some((key, _)) => {
            let what = format!("the serial port is not a PCI device; leave {key} out");
            Err(ConfigError::new(format!("--serial {serial}"), Problem::Conflict(what)))
        }
        None => Ok(()),
    }
}

/// Checks the virtio console of a VM with this serial port: they must not share a file or a socket. They may share the
/// terminal, as in Cloud Hypervisor, where that is what `--serial tty` alone does.
fn check_console(console: &ConsoleConfig, serial: &ConsoleConfig) -> Result<(), ConfigError> {
    check_path("--console", console)?;
    if console.mode != serial.mode {
        return Ok(());
    }
    // What is written to a device such as /dev/null overwrites nothing.
    let is_device = console.file.as_ref().is_some_and(|path| path.starts_with("/dev"));
    let shared = match console.mode {
        ConsoleMode::File if console.file == serial.file && !is_device => "file",
        ConsoleMode::Socket if console.socket == serial.socket => "socket",
        _ => return Ok(()),
    };
    let what = format!("the serial port has this {shared} (--serial {serial}); give one of them another path");
    Err(ConfigError::new(format!("--console {console}"), Problem::Conflict(what)))
}

/// Checks that a path is given if the mode needs one, and only then.
fn check_path(option: &str, console: &ConsoleConfig) -> Result<(), ConfigError> {
    let needed = (console.mode == ConsoleMode::File, console.mode == ConsoleMode::Socket);
    if console.mode == ConsoleMode::Pty && console.socket.is_none() {
        // The path that vm.info reported for the previous pseudo-terminal. The VM gets another one.
        return Ok(());
    }
    let fail = |what: &str| Err(ConfigError::new(format!("{option} {console}"), Problem::Conflict(what.to_string())));
    match (console.file.is_some(), console.socket.is_some()) {
        given if given == needed => Ok(()),
        (false, _) if needed.0 => fail("mode File needs a file; give one"),
        (_, false) if needed.1 => fail("mode Socket needs a socket; give one"),
        (true, _) if !needed.0 => fail("only mode File has a file; leave file out"),
        _ => fail("only mode Socket has a socket; leave socket out"),
    }
}
