//! Check that files of memory zones are empty before pages arrive: pages that the guest has never used are not sent.

use std::fs::File;
use std::io;
use std::path::Path;

use crate::config::MemoryZoneConfig;
use crate::lazy_memory::present;

/// Checks that no file of `zones` has data. A file could be left over, or in use by the guest itself if the source is
/// on this host. In a folder, a new file is created.
///
/// # Errors
///
/// Fails with the first file with data, and the remedy.
pub(super) fn check(zones: &[MemoryZoneConfig]) -> Result<(), String> {
    for zone in zones {
        let Some(path) = zone.file.as_deref().filter(|path| path.is_file()) else { continue };
        let option = || format!("--memory-zone id={},file={}", zone.id, path.display());
        let failed = |error| format!("{}: cannot be looked into: {error}; give a file that can be read", option());
        if !is_empty(path, zone.size).map_err(failed)? {
            return Err(format!(
                "{}: the file has data, and may be in use; give this host a new one (truncate --size), or send the VM \
                 with local=true",
                option()
            ));
        }
    }
    Ok(())
}

/// True if the first `len` bytes of the file are holes.
fn is_empty(path: &Path, len: u64) -> io::Result<bool> {
    let mut has_data = false;
    present::data(&File::open(path)?, &(0..len), &mut |_| {
        has_data = true;
        Ok(())
    })?;
    Ok(!has_data)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::*;

    #[test]
    fn a_file_that_has_a_name_is_used_only_if_it_has_no_data() {
        let folder = tempfile::tempdir().unwrap();
        let [full, empty] = ["full", "empty"].map(|name| folder.path().join(name));
        for path in [&full, &empty] {
            File::create(path).unwrap().set_len(1 << 20).unwrap();
        }
        let zone = |id: &str, path: &Path| format!("id={id},size=1M,file={}", path.display()).parse().unwrap();
        let zones = ["id=none,size=1M".parse().unwrap(), zone("folder", folder.path()), zone("empty", &empty)];
        assert_eq!(check(&zones), Ok(()));
        let zones = [zone("empty", &empty), zone("full", &full)];
        assert_eq!(check(&zones), Ok(()));
        // The last byte.
        File::options().write(true).open(&full).unwrap().write_all_at(&[1], (1 << 20) - 1).unwrap();
        let said = check(&zones).unwrap_err();
        assert!(
            said.starts_with(&format!("--memory-zone id=full,file={}: the file has data", full.display())),
            "{said}"
        );
    }
}
