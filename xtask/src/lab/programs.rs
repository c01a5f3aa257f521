//! Programs from Debian packages with their libraries, for machines without the rest of Debian.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Context, Error, Result};
use crate::fetch::apt::{self, Apt, output};
use crate::lab::Lab;

/// The name of the file that records the versions of a folder's programs.
pub(crate) const RECORD: &str = "package";
/// The dynamic loader. No program lists it as a library.
pub(crate) const LOADER: &str = "ld-linux-x86-64.so.2";
/// Libraries that DPDK loads by name, on request: the drivers of virtio NICs and of the X550, and pools of packets.
const DPDK_DRIVERS: [&str; 3] = ["librte_net_virtio.so.25", "librte_net_ixgbe.so.25", "librte_mempool_ring.so.25"];

/// The folder of `ip` and `nft`, which configure container networks in a guest. Their libraries are in `lib`. Fetches
/// them if missing.
pub(crate) fn of_containers(lab: &Lab) -> Result<PathBuf> {
    let folder = lab.folder().join("containers");
    let record = lab.folder().join("containers.package");
    if !record.exists() {
        let unpacked = lab.folder().join("containers.unpacked");
        let _ = fs::remove_dir_all(&unpacked);
        let mut apt = Apt::with_backports(&lab.folder().join("apt-backports"))?;
        let packages = apt.with_libraries(&["iproute2", "nftables", "zlib1g"], apt::RELEASE_6_12)?;
        let packages: Vec<&str> = packages.iter().map(String::as_str).collect();
        let names = apt.unpack("iproute2, nftables and their libraries", &packages, &unpacked)?;
        collect(&unpacked, &["usr/sbin/nft", "usr/bin/ip"], &folder)?;
        fs::write(&record, names).context("recording the versions of the programs")?;
        let _ = fs::remove_dir_all(&unpacked);
    }
    Ok(folder)
}

/// The folder of programs with which a guest configures a NIC and its VFs: those of iproute2, and `ethtool`. Their
/// libraries are in `lib`. Fetches them if missing.
pub(crate) fn of_nics(lab: &Lab) -> Result<PathBuf> {
    let programs = ["usr/bin/ip", "usr/sbin/tc", "usr/sbin/bridge", "usr/sbin/ethtool"];
    from_packages(lab, "nic-tools", &["iproute2", "ethtool"], &programs)
}

/// Fetches systemd for a root in a first-level machine, if missing: its manager, the program that starts services, and
/// `systemctl`. Their libraries are in `lib`. No unit of Debian is there.
pub(crate) fn of_systemd(lab: &Lab) -> Result<()> {
    let programs = ["usr/lib/systemd/systemd", "usr/lib/systemd/systemd-executor", "usr/bin/systemctl"];
    from_packages(lab, "systemd", &["systemd"], &programs).map(drop)
}

/// The folder `name` of the lab with these programs of packages, and their libraries in `lib`. Fetches them if missing.
fn from_packages(lab: &Lab, name: &str, packages: &[&str], programs: &[&str]) -> Result<PathBuf> {
    let folder = lab.folder().join(name);
    let (record, unpacked) = (folder.join(RECORD), lab.folder().join(format!("{name}.unpacked")));
    if record.exists() {
        return Ok(folder);
    }
    let _ = fs::remove_dir_all(&unpacked);
    let mut apt = Apt::with_backports(&lab.folder().join("apt-backports"))?;
    let wanted = apt.with_libraries(&[packages, &["zlib1g"]].concat(), apt::RELEASE_6_12)?;
    let wanted: Vec<&str> = wanted.iter().map(String::as_str).collect();
    let what = format!("{} and their libraries", packages.join(", "));
    let names = apt.unpack(&what, &wanted, &unpacked)?;
    collect(&unpacked, programs, &folder)?;
    fs::write(&record, names).context("recording the versions of the programs")?;
    let _ = fs::remove_dir_all(&unpacked);
    Ok(folder)
}

/// The folder of DPDK's testpmd with the driver of virtio NICs, for a guest. Their libraries are in `lib`. Fetches them
/// if missing.
pub(crate) fn of_dpdk(lab: &Lab) -> Result<PathBuf> {
    let (peers, folder) = (lab.peers()?, lab.folder().join("dpdk"));
    let packages = peers.join("package");
    let versions = fs::read_to_string(&packages).context(packages.display())? + &DPDK_DRIVERS.join(" ");
    let record = folder.join(RECORD);
    if fs::read_to_string(&record).is_ok_and(|have| have == versions) {
        return Ok(folder);
    }
    collect_with_plugins(&peers, &["usr/bin/dpdk-testpmd"], &DPDK_DRIVERS, &folder)?;
    fs::write(&record, versions).context("recording the versions of the programs")?;
    Ok(folder)
}

/// Copies `programs` of the unpacked packages below `root` to `folder`, and their libraries and the loader to its
/// subfolder `lib`.
pub(crate) fn collect(root: &Path, programs: &[&str], folder: &Path) -> Result<()> {
    collect_with_plugins(root, programs, &[], folder)
}

/// As [`collect`], with the libraries `plugins`, which no program lists, and their dependencies.
fn collect_with_plugins(root: &Path, programs: &[&str], plugins: &[&str], folder: &Path) -> Result<()> {
    apt::install_missing(&[("objdump", "binutils")])?;
    let _ = fs::remove_dir_all(folder);
    let available = libraries(&root.join("usr/lib/x86_64-linux-gnu"))?;
    let mut wanted: Vec<PathBuf> = programs.iter().map(|program| root.join(program)).collect();
    for program in &wanted {
        copy(program, folder)?;
    }
    for plugin in plugins {
        let path = find(&available, plugin, root)?;
        copy(path, &folder.join("lib"))?;
        wanted.push(path.clone());
    }
    let mut found: BTreeSet<_> = plugins.iter().map(|plugin| (*plugin).to_owned()).collect();
    while let Some(file) = wanted.pop() {
        for name in needed(&file)?.into_iter().chain([LOADER.to_owned()]) {
            let path = find(&available, &name, &file)?;
            if found.insert(name) {
                copy(path, &folder.join("lib"))?;
                wanted.push(path.clone());
            }
        }
    }
    Ok(())
}

/// The library `name`, which `user` needs.
fn find<'a>(available: &'a BTreeMap<String, PathBuf>, name: &str, user: &Path) -> Result<&'a PathBuf> {
    available.get(name).ok_or_else(|| Error::new(format!("the packages of {} lack {name}", user.display())))
}

/// Copies a file, or the target of a link, into `folder`.
pub(crate) fn copy(file: &Path, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).context(format!("making {}", folder.display()))?;
    let name = file.file_name().unwrap_or_default();
    fs::copy(file, folder.join(name)).map(drop).context(file.display())
}

/// The libraries in a folder and its subfolders, by name. Of two with the same name, the one nearer to the folder is
/// used.
fn libraries(folder: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).context(folder.display())?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push(entry.path());
            } else if name.contains(".so") {
                found.entry(name).or_insert_with(|| entry.path());
            }
        }
    }
    Ok(found)
}

/// The names of the libraries that `file` needs.
fn needed(file: &Path) -> Result<Vec<String>> {
    let text = output(Command::new("objdump").arg("-p").arg(file))?;
    Ok(text.lines().filter_map(library).collect())
}

/// The library that a line of `objdump -p` names.
fn library(line: &str) -> Option<String> {
    Some(line.trim().strip_prefix("NEEDED")?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_line_of_a_needed_library_names_one() {
        assert_eq!(library("  NEEDED               libc.so.6").as_deref(), Some("libc.so.6"));
        assert_eq!(library("  SONAME               libz.so.1"), None);
    }
}
