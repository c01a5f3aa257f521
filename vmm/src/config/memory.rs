//! The rules for the guest's memory.

use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::{HotplugMethod, MemoryConfig, MemoryZoneConfig, bytes};

/// The most memory: 46 address bits, less the regions above memory.
const MOST_MEMORY: u64 = 1 << 45;
/// The unit of memory, in bytes: a page.
const PAGE: u64 = 4096;

/// Checks the guest's memory.
///
/// # Errors
///
/// Fails with the first mistake.
pub(crate) fn check_memory(memory: &MemoryConfig) -> Result<(), ConfigError> {
    let fail =
        |key: &str, value: u64, problem| Err(ConfigError::new(format!("--memory {key}={}", bytes(value)), problem));
    match memory.zones.as_slice() {
        [] => check_part(memory.size, memory.hugepages, memory.hugepage_size)
            .map_err(|(key, value, problem)| ConfigError::new(format!("--memory {key}={}", bytes(value)), problem))?,
        zones => check_zones(memory, zones)?,
    }
    check_hotplugged(memory)?;
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

/// Checks the sizes of virtio memory devices.
fn check_hotplugged(memory: &MemoryConfig) -> Result<(), ConfigError> {
    let zones = |size: fn(&MemoryZoneConfig) -> Option<u64>| {
        memory.zones.iter().find_map(move |zone| Some((zone, size(zone).filter(|size| *size > 0)?)))
    };
    let conflict = |option: String, what: &str| Err(ConfigError::new(option, Problem::Conflict(what.to_string())));
    if memory.hotplug_method == HotplugMethod::Acpi {
        if let Some(size) = memory.hotplugged_size.filter(|size| *size > 0) {
            let what = "only with hotplug_method=virtio-mem; add that, or make size larger";
            return conflict(format!("--memory hotplugged_size={}", bytes(size)), what);
        }
        let what = "memory is added to zones by virtio-mem alone; give --memory size=0,hotplug_method=virtio-mem";
        for (key, found) in
            [("hotplug_size", zones(|zone| zone.hotplug_size)), ("hotplugged_size", zones(|zone| zone.hotplugged_size))]
        {
            if let Some((zone, size)) = found {
                return conflict(format!("--memory-zone id={},{key}={}", zone.id, bytes(size)), what);
            }
        }
        return Ok(());
    }
    if !memory.zones.is_empty() {
        let own = [("hotplug_size", memory.hotplug_size), ("hotplugged_size", memory.hotplugged_size)];
        if let Some((key, Some(size))) = own.into_iter().find(|(_, size)| size.is_some_and(|size| size > 0)) {
            let what = "memory is added to each zone by itself; give it to a --memory-zone";
            return conflict(format!("--memory {key}={}", bytes(size)), what);
        }
    }
    let mut all = memory.total();
    for part in memory.parts() {
        let option =
            if part.id.is_empty() { "--memory ".to_string() } else { format!("--memory-zone id={},", part.id) };
        check_room(&part)
            .map_err(|(key, value, problem)| ConfigError::new(format!("{option}{key}={}", bytes(value)), problem))?;
        all = all.saturating_add(part.hotplug_size.unwrap_or(0));
        if all > MOST_MEMORY {
            let what = format!("together with size more than a guest can address; give at most {}G", MOST_MEMORY >> 30);
            let option = format!("{option}hotplug_size={}", bytes(part.hotplug_size.unwrap_or(0)));
            return Err(ConfigError::new(option, Problem::Limit(what)));
        }
    }
    Ok(())
}

/// The block size of a virtio memory device, in bytes: the unit in which Linux can add and remove memory, or the size
/// of a huge page. The host's default huge page size is not known here.
pub(crate) fn block(hugepage_size: Option<u64>) -> u64 {
    hugepage_size.unwrap_or(0).max(BLOCK)
}

/// The smallest block of a virtio memory device, as in Cloud Hypervisor: the size of a transparent huge page.
const BLOCK: u64 = 2 << 20;

/// Checks the size of a part's virtio memory device. An error names the key and its value.
fn check_room(part: &MemoryZoneConfig) -> Result<(), (&'static str, u64, Problem)> {
    let (room, block) = (part.room().unwrap_or(0), block(part.hugepage_size));
    let has = part.hotplugged_size.unwrap_or(0);
    for (key, size) in [("hotplug_size", room), ("hotplugged_size", has)] {
        if !size.is_multiple_of(block) {
            let what = format!("memory is added in steps of {}; give a multiple of that", bytes(block));
            return Err((key, size, Problem::Value(what)));
        }
    }
    if has > room {
        let what = format!("there is room for {} (hotplug_size); give less, or more room", bytes(room));
        return Err(("hotplugged_size", has, Problem::Conflict(what)));
    }
    if room > 0 && part.file.is_some() {
        let what = "a zone with the contents of a file keeps its size; leave one out".to_string();
        return Err(("hotplug_size", room, Problem::Conflict(what)));
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

/// The most zones; a zone with a virtio memory device counts twice. A backend that cannot add single regions supports
/// 8, and one zone may be split by the hole below 4 GiB.
const MOST_ZONES: usize = 7;
/// The most NUMA nodes of a host, as Linux counts them.
const MOST_NODES: u32 = 1024;

/// Checks the zones of the memory.
fn check_zones(memory: &MemoryConfig, zones: &[MemoryZoneConfig]) -> Result<(), ConfigError> {
    let size = &memory.size;
    let fail = |what: String, problem| Err(ConfigError::new(what, problem));
    if *size != 0 {
        let what = "the zones (--memory-zone) have all of the memory; give size=0".to_string();
        return fail(format!("--memory size={}", bytes(*size)), Problem::Conflict(what));
    }
    if let Some(room) = memory.room() {
        let what = "memory that consists of zones cannot be added to; leave it out".to_string();
        return fail(format!("--memory hotplug_size={}", bytes(room)), Problem::Conflict(what));
    }
    if zones.len() > MOST_ZONES {
        let what = format!("a VM has at most {MOST_ZONES} memory zones; give fewer");
        return fail(format!("--memory-zone: {} zones", zones.len()), Problem::Limit(what));
    }
    let growing = zones.iter().filter(|zone| zone.room().is_some()).count();
    if zones.len() + growing > MOST_ZONES {
        let what = format!("together at most {MOST_ZONES}; give fewer");
        let option = format!("--memory-zone: {} zones, {growing} with hotplug_size", zones.len());
        return fail(option, Problem::Limit(what));
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
        if zone.file.as_ref().is_some_and(|file| file.as_os_str().is_empty()) {
            return fail(format!("{option},file="), Problem::Value("the path is empty; give a file".to_string()));
        }
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
