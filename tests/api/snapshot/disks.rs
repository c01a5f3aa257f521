//! Disks of snapshots that are full, or do not answer.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use super::{folder, idle, names, said, snapshot};
use crate::rig::driven::tasks;
use crate::rig::vmm::{Vmm, wait_for};

/// A file system of limited size, until it is dropped.
struct Small(PathBuf);

impl Small {
    fn mount(at: &Path, size: &str) -> Self {
        let options = format!("size={size}");
        let status = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(at).status().unwrap();
        assert!(status.success(), "this test needs root");
        Self(at.to_path_buf())
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// A file system frozen until it is dropped.
struct Frozen {
    at: PathBuf,
    image: PathBuf,
    /// Thaws it if this program was killed: a process that waits for it cannot be killed.
    rescue: Child,
}

impl Frozen {
    fn mount(at: &Path, image: PathBuf) -> Self {
        fs::File::create(&image).unwrap().set_len(256 << 20).unwrap();
        let is_done = |command: &mut Command| command.status().is_ok_and(|status| status.success());
        assert!(is_done(Command::new("mkfs.ext4").arg("-q").arg(&image)), "mkfs.ext4 is missing: e2fsprogs");
        let mounted = is_done(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(at));
        assert!(mounted, "this test needs root and a loop device");
        let mut rescue = Command::new("sh");
        rescue.args(["-c", "sleep 120; fsfreeze -u \"$0\"; umount -l \"$0\""]).arg(at).process_group(0);
        let rescue = rescue.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        Self { at: at.to_path_buf(), image, rescue }
    }

    fn freeze(&self, option: &str) {
        assert!(Command::new("fsfreeze").arg(option).arg(&self.at).status().unwrap().success());
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").arg("-u").arg(&self.at).status();
        let _ = Command::new("umount").args(["-l"]).arg(&self.at).status();
        let _ = fs::remove_file(&self.image);
        let _ = self.rescue.kill();
        let _ = self.rescue.wait();
    }
}

/// True if the thread of this name is in uninterruptible sleep (`D`, proc_pid_stat(5)).
fn waits_for_disk(vmm: &Vmm, name: &str) -> bool {
    tasks(vmm.pid()).into_iter().filter(|(_, of)| of == name).any(|(task, _)| {
        let stat = fs::read_to_string(format!("/proc/{}/task/{task}/stat", vmm.pid())).unwrap_or_default();
        stat.rsplit_once(')').is_some_and(|(_, fields)| fields.trim_start().starts_with('D'))
    })
}

#[test]
fn a_vm_ends_although_the_disk_of_its_snapshot_does_not_answer() {
    let vmm = Vmm::start();
    let mut client = idle(&vmm, json!([]));
    let [(path, url), (other, other_url)] = ["saved", "other"].map(|name| folder(&vmm, name));
    let disk = Frozen::mount(&path, vmm.files.path("image"));
    disk.freeze("-f");
    let saving = std::thread::spawn({
        let (mut client, url) = (vmm.client(), url.clone());
        move || snapshot(&mut client, &url)
    });
    wait_for("the snapshot to wait for its disk", || waits_for_disk(&vmm, "snapshot"));
    let began = Instant::now();
    client.put("vm.delete").expect(204);
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    // The program has another VM in the meantime, which cannot be saved yet.
    let mut client = idle(&vmm, json!([]));
    let refused = snapshot(&mut client, &other_url);
    assert_eq!((refused.status, said(&refused).contains("still waits for its disk")), (409, true), "{refused:?}");
    assert!(!saving.is_finished());
    disk.freeze("-u");
    let answer = saving.join().unwrap();
    assert_eq!((answer.status, said(&answer).contains("ended before its snapshot")), (409, true), "{answer:?}");
    assert_eq!(names(&path), ["lost+found"]);
    wait_for("the thread's end", || !vmm.threads().contains(&"snapshot\n".to_string()));
    snapshot(&mut client, &other_url).expect(204);
    assert_eq!(names(&other).len(), 3);
}

#[test]
fn a_disk_that_is_full_ends_a_snapshot_and_not_the_vm() {
    let vmm = Vmm::start();
    let mut client = idle(&vmm, json!([]));
    let (path, url) = folder(&vmm, "saved");
    let small = Small::mount(&path, "16k");
    let full = snapshot(&mut client, &url);
    assert_eq!((full.status, said(&full).contains("No space left")), (500, true), "{full:?}");
    assert!(names(&path).is_empty());
    drop(small);
    snapshot(&mut client, &url).expect(204);
    client.put("vm.resume").expect(204);
}
