//! Records of ADD, in files that survive the plugin, and a lock for each VF.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::{FdFlags, fcntl_setfd};
use serde::{Deserialize, Serialize};

use crate::error::{Code, Error, Result};

/// End of the names of records, because IPAM plugins keep files in the same folder.
const SUFFIX: &str = ".virtio-sriov-cni";
/// End of the name of a record that is being written.
const UNFINISHED: &str = ".new";
/// Folder of locks. No network has this name, because it begins with a dot.
const LOCKS: &str = ".virtio-sriov-cni";

/// An attachment: what ADD took, and how it was before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Network.
    pub network: String,
    /// Container.
    pub container: String,
    /// Interface in the container.
    pub interface: String,
    /// File of the container's namespace.
    pub netns: PathBuf,
    /// PCI address of the VF.
    pub vf: String,
    /// Interface as the host had it. None with a driver for user space.
    pub link: Option<Original>,
    /// Variable `CNI_ARGS`, for the IPAM plugin.
    pub arguments: String,
    /// Configuration, for the IPAM plugin.
    pub config: String,
}

/// An interface as the host had it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Original {
    /// Name.
    pub name: String,
    /// True if it was up.
    pub up: bool,
    /// Further names.
    #[serde(default)]
    pub altnames: Vec<String>,
    /// Driver of the VF; none in records of plugins that did not note it.
    #[serde(default)]
    pub driver: String,
}

/// The folder of all records, `/var/lib/cni`.
#[derive(Debug, Clone)]
pub struct Store {
    folder: PathBuf,
}

/// The lock of a VF, released when it is dropped and no IPAM plugin runs.
#[derive(Debug)]
pub struct VfLock {
    _file: File,
}

impl Record {
    /// Words for messages: the container, its interface and its network.
    pub fn describe(&self) -> String {
        format!("container {}, {}, network {}", self.container, self.interface, self.network)
    }
}

impl Store {
    /// The store in this folder.
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_path_buf() }
    }

    fn path(&self, network: &str, container: &str, interface: &str) -> PathBuf {
        // Neither part has a colon.
        self.folder.join(network).join(format!("{container}:{interface}{SUFFIX}"))
    }

    /// Locks a VF against other runs of this plugin, until `limit` has passed.
    ///
    /// # Errors
    ///
    /// [`Code::TryAgain`] if another run has it, and [`Code::Io`].
    pub fn lock(&self, vf: &str, limit: Duration) -> Result<VfLock> {
        let folder = self.folder.join(LOCKS);
        let until = Instant::now() + limit;
        let path = folder.join(vf);
        let failed = |error: io::Error| Error::io(path.display(), &error);
        make_folder(&folder).map_err(failed)?;
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(&path).map_err(failed)?;
        let file = vfctl::lock::lock(file, until).map_err(failed)?.ok_or_else(|| {
            let message = format!("{}: another run of this plugin has the VF; try again", path.display());
            Error::new(Code::TryAgain, message)
        })?;
        // An IPAM plugin inherits the lock: if it survives this program, DEL waits for its end and releases what it
        // took.
        fcntl_setfd(&file, FdFlags::empty()).map_err(|error| failed(error.into()))?;
        Ok(VfLock { _file: file })
    }

    /// Writes a record. It is on the disk when this returns.
    ///
    /// # Errors
    ///
    /// [`Code::Io`].
    pub fn write(&self, record: &Record) -> Result<()> {
        let path = self.path(&record.network, &record.container, &record.interface);
        self.replace(&path, record).map_err(|error| Error::io(path.display(), &error))
    }

    fn replace(&self, path: &Path, record: &Record) -> io::Result<()> {
        let folder = self.folder.join(&record.network);
        make_folder(&folder)?;
        let new = unfinished(path);
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(&serde_json::to_vec(record)?)?;
        file.sync_all()?;
        fs::rename(&new, path)?;
        File::open(&folder)?.sync_all()
    }

    /// The record of an attachment, if there is one.
    ///
    /// # Errors
    ///
    /// [`Code::Io`].
    pub fn read(&self, network: &str, container: &str, interface: &str) -> Result<Option<Record>> {
        read(&self.path(network, container, interface))
    }

    /// Removes the record of an attachment, if there is one.
    ///
    /// # Errors
    ///
    /// [`Code::Io`].
    pub fn remove(&self, network: &str, container: &str, interface: &str) -> Result<()> {
        let path = self.path(network, container, interface);
        remove(&unfinished(&path))?;
        remove(&path)
    }

    /// The records of a network. What a run that was killed had begun to write is removed.
    ///
    /// # Errors
    ///
    /// [`Code::Io`].
    pub fn of_network(&self, network: &str) -> Result<Vec<Record>> {
        let mut records = Vec::new();
        for path in entries(&self.folder.join(network))? {
            let text = path.to_string_lossy();
            if text.ends_with(SUFFIX) {
                records.extend(read(&path)?);
            } else if text.ends_with(&format!("{SUFFIX}{UNFINISHED}")) {
                remove(&path)?;
            }
        }
        Ok(records)
    }

    /// The record of the attachment that has a VF. The caller has locked the VF. `warn` receives a line for each record
    /// that is damaged and does not name this VF.
    ///
    /// # Errors
    ///
    /// [`Code::Io`], also for a damaged record that names this VF.
    pub fn holder(&self, vf: &str, warn: &dyn Fn(&str)) -> Result<Option<Record>> {
        for folder in entries(&self.folder)?.into_iter().filter(|path| path.is_dir()) {
            for path in entries(&folder)?.into_iter().filter(|path| path.to_string_lossy().ends_with(SUFFIX)) {
                // Others come and go at the same time.
                match read(&path) {
                    Ok(record) => {
                        if let Some(record) = record.filter(|record| record.vf == vf) {
                            return Ok(Some(record));
                        }
                    }
                    // One damaged record must not fail each ADD of the node.
                    Err(error) => match fs::read(&path) {
                        Ok(bytes) if !String::from_utf8_lossy(&bytes).contains(vf) => warn(&error.message),
                        _ => return Err(error),
                    },
                }
            }
        }
        Ok(None)
    }
}

fn unfinished(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(UNFINISHED);
    name.into()
}

/// Makes a folder that only root reads: configurations may have secrets.
fn make_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

fn read(path: &Path) -> Result<Option<Record>> {
    match fs::read(path) {
        Ok(bytes) => {
            let failed = |error| Error::new(Code::Io, format!("{}: {error}; remove it", path.display()));
            serde_json::from_slice(&bytes).map(Some).map_err(failed)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io(path.display(), &error)),
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::io(path.display(), &error)),
        _ => Ok(()),
    }
}

/// The entries of a folder; none if it is missing.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let listed = match fs::read_dir(folder) {
        Ok(listed) => listed.collect::<io::Result<Vec<_>>>(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => Err(error),
    };
    let listed = listed.map_err(|error| Error::io(folder.display(), &error))?;
    Ok(listed.into_iter().map(|entry| entry.path()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(container: &str, vf: &str) -> Record {
        Record {
            network: "net".into(),
            container: container.into(),
            interface: "net1".into(),
            netns: "/run/netns/a".into(),
            vf: vf.into(),
            link: Some(Original {
                name: "eth1".into(),
                up: false,
                altnames: vec!["enp1s0v0".into()],
                driver: "virtio-pci".into(),
            }),
            arguments: String::new(),
            config: "{}".into(),
        }
    }

    #[test]
    fn a_record_is_found_by_attachment_network_and_vf() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path());
        assert_eq!(store.read("net", "a", "net1"), Ok(None));
        let (a, b) = (record("a", "0000:01:00.1"), record("b", "0000:01:00.2"));
        store.write(&a).unwrap();
        store.write(&b).unwrap();
        assert_eq!(store.read("net", "a", "net1"), Ok(Some(a.clone())));
        assert_eq!(store.holder("0000:01:00.2", &|_| {}), Ok(Some(b)));
        assert_eq!(store.of_network("net").unwrap().len(), 2);
        assert_eq!(store.of_network("other"), Ok(vec![]));
        store.remove("net", "a", "net1").unwrap();
        store.remove("net", "a", "net1").unwrap();
        assert_eq!(store.holder("0000:01:00.1", &|_| {}), Ok(None));
    }

    #[test]
    fn files_of_others_are_left_and_unfinished_ones_removed() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path());
        let net = folder.path().join("net");
        fs::create_dir_all(&net).unwrap();
        fs::write(net.join("10.0.0.1"), "c1").unwrap();
        fs::write(net.join(format!("c1:net1{SUFFIX}{UNFINISHED}")), "{").unwrap();
        assert_eq!(store.of_network("net"), Ok(vec![]));
        let left: Vec<_> = fs::read_dir(&net).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["10.0.0.1"]);
    }

    #[test]
    fn a_damaged_record_matters_to_its_vf_alone() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path());
        let net = folder.path().join("net");
        fs::create_dir_all(&net).unwrap();
        fs::write(net.join(format!("c1:net1{SUFFIX}")), r#"{"vf": "0000:01:00.1", "#).unwrap();
        let warnings = std::cell::RefCell::new(Vec::new());
        let warn = |line: &str| warnings.borrow_mut().push(line.to_string());
        assert!(store.holder("0000:01:00.1", &warn).unwrap_err().message.contains("c1:net1"));
        assert_eq!(store.holder("0000:01:00.2", &warn), Ok(None));
        let warnings = warnings.into_inner();
        assert!(warnings.len() == 1 && warnings[0].ends_with("; remove it"), "{warnings:?}");
    }

    #[test]
    fn a_vf_has_one_lock_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path());
        let lock = store.lock("0000:01:00.1", Duration::ZERO).unwrap();
        assert!(store.lock("0000:01:00.1", Duration::ZERO).unwrap_err().is(Code::TryAgain));
        store.lock("0000:01:00.2", Duration::ZERO).unwrap();
        drop(lock);
        store.lock("0000:01:00.1", Duration::from_secs(60)).unwrap();
    }
}
