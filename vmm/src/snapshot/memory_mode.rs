//! Ways to restore guest memory.

use crate::config::{MemoryConfig, MemoryRestoreMode, RestoreConfig};
use crate::lazy_memory::page_faults;

/// Way to restore guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryMode {
    /// Read before the guest runs.
    Copy,
    /// Private mapping of the image file.
    Map,
    /// Read on first use, by the guest or by the host.
    OnDemand,
}

/// Chooses the mode for `restore`, with the reason for the log. `needs_shared`: backends map the memory.
///
/// # Errors
///
/// Fails if the mode is unsafe here: the option, the reason, and the remedy.
pub(crate) fn choose(
    restore: &RestoreConfig,
    memory: &MemoryConfig,
    needs_shared: bool,
) -> Result<(MemoryMode, String), String> {
    let mode = restore.memory_restore_mode;
    let refuse = |why: &str| {
        let name = mode.name();
        Err(format!("memory_restore_mode={name}: {why}; give copy, or auto"))
    };
    let obstacle = obstacle(restore, memory, needs_shared);
    match mode {
        MemoryRestoreMode::Copy => Ok((MemoryMode::Copy, "asked for".to_string())),
        MemoryRestoreMode::OnDemand | MemoryRestoreMode::Map => match (obstacle, mode) {
            (Some(why), _) => refuse(why),
            (None, MemoryRestoreMode::Map) => Ok((MemoryMode::Map, "asked for".to_string())),
            (None, _) => match page_faults::check() {
                Ok(()) => Ok((MemoryMode::OnDemand, "asked for".to_string())),
                Err(error) => refuse(&error),
            },
        },
        // Mapping is safe wherever reading on demand is, and costs nothing.
        MemoryRestoreMode::Auto => Ok(match obstacle {
            Some(why) => (MemoryMode::Copy, why.to_string()),
            None => (MemoryMode::Map, "the memory is private, and nothing else maps it".to_string()),
        }),
    }
}

/// Returns the reason why all memory must be read before the guest runs, if there is one.
fn obstacle(restore: &RestoreConfig, memory: &MemoryConfig, needs_shared: bool) -> Option<&'static str> {
    let parts = memory.parts();
    if needs_shared {
        // Another process would read missing pages as zero, without a fault in this process.
        return Some("a vhost-user or vDPA backend maps the guest's memory, and would find it empty");
    }
    if memory.shared || parts.iter().any(|part| part.shared) {
        return Some("the guest's memory is shared (shared=on)");
    }
    if memory.hugepages || parts.iter().any(|part| part.hugepages) {
        return Some("the guest's memory consists of huge pages (hugepages=on)");
    }
    if parts.iter().any(|part| part.file.is_some()) {
        return Some("a memory zone has a file of its own");
    }
    if restore.prefault || memory.prefault || parts.iter().any(|part| part.prefault) {
        return Some("prefault=on asks for all memory from the start");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(mode: &str, memory: &str, needs_shared: bool) -> Result<MemoryMode, String> {
        let restore = format!("source_url=/s,memory_restore_mode={mode}").parse().unwrap();
        choose(&restore, &memory.parse().unwrap(), needs_shared).map(|(mode, _)| mode)
    }

    #[test]
    fn a_mode_that_is_unsound_is_refused_and_auto_does_without() {
        for (memory, shared) in [
            ("size=1G,shared=on", false),
            ("size=1G,hugepages=on", false),
            ("size=1G,prefault=on", false),
            ("size=1G", true),
        ] {
            assert_eq!(
                [chosen("copy", memory, shared), chosen("auto", memory, shared)],
                [Ok(MemoryMode::Copy), Ok(MemoryMode::Copy)]
            );
            for mode in ["map", "ondemand"] {
                let said = chosen(mode, memory, shared).unwrap_err();
                assert!(said.starts_with(&format!("memory_restore_mode={mode}: ")), "{said}");
                assert!(said.ends_with("; give copy, or auto"), "{said}");
            }
        }
        assert_eq!(chosen("auto", "size=1G", false), Ok(MemoryMode::Map));
        assert_eq!(chosen("map", "size=1G", false), Ok(MemoryMode::Map));
    }

    #[test]
    fn memory_that_is_to_be_there_at_once_is_copied() {
        for mode in ["map", "ondemand"] {
            let restore = format!("source_url=/s,prefault=on,memory_restore_mode={mode}").parse().unwrap();
            assert!(choose(&restore, &MemoryConfig::default(), false).is_err());
        }
    }
}
