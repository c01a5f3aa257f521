//! The guides of docs/guide work as written. The blocks of a guide that are marked `sh` run in one shell, one after the
//! other, with a guest of a few instructions. A block that starts the program runs in the background.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use crate::files::Files;
use crate::readme::{blocks, path_with_commands};

/// Seconds that the commands of a guide may take on a busy machine.
const LIMIT: &str = "600";

fn guides() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guide");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "md")).collect()
}

/// The API socket of the program that `block` starts.
fn started(block: &str) -> Option<&str> {
    let arguments = block.strip_prefix("cloud-hypervisor ")?;
    let socket = arguments.split_once("--api-socket ")?.1.split_whitespace().next()?;
    Some(socket.strip_prefix("path=").unwrap_or(socket))
}

/// A shell script of `blocks`, which ends all programs that it starts.
fn script(blocks: &[String]) -> String {
    let mut script = String::from("vmms=; trap 'kill $vmms 2> /dev/null || true' EXIT\n");
    for block in blocks {
        match started(block) {
            Some(socket) => script.push_str(&format!(
                "{} &\nlast=$!; vmms=\"$vmms $last\"\n\
                 until [ -S {socket} ]; do kill -0 $last || exit 1; sleep 0.1; done\n",
                block.trim_end()
            )),
            None => script.push_str(block),
        }
        if block.contains("shutdown-vmm") {
            // The socket's end comes before that of the taps.
            script.push_str("wait $last\n");
        }
    }
    script
}

/// Runs the commands of a guide, and checks that none fails.
fn run(guide: &Path) {
    let blocks = blocks(&fs::read_to_string(guide).unwrap(), "```sh");
    assert!(blocks.iter().any(|block| started(block).is_some()), "{}: starts no VM", guide.display());
    let files = Files::new();
    fs::rename(files.idle_kernel(), files.path("vmlinuz")).unwrap();
    files.sparse("initrd.img", 4096);
    // The kernel starts as firmware does.
    fs::copy(files.path("vmlinuz"), files.path("hypervisor-fw")).unwrap();
    for disk in ["debian.raw", "cidata.iso"] {
        files.sparse(disk, 1 << 20);
    }
    let mut shell = Command::new("timeout");
    shell.args([LIMIT, "sh", "-e", "-c", &script(&blocks)]).current_dir(files.path(""));
    let done = shell.env("PATH", path_with_commands()).stdin(Stdio::null()).output().unwrap();
    let (printed, said) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{}: {}\n{said}\n{printed}", guide.display(), done.status);
}

#[test]
fn the_guides_run_as_they_are_written() {
    let guides = guides();
    assert!(guides.len() > 4, "{guides:?}");
    // Each thread enters namespaces of its own.
    let runs: Vec<_> = guides.into_iter().map(|guide| thread::spawn(move || run(&guide))).collect();
    let failed = runs.into_iter().map(thread::JoinHandle::join).filter(Result::is_err).count();
    assert_eq!(failed, 0, "guides with a command that failed; see above");
}

#[test]
fn a_program_in_a_guide_runs_in_the_background_until_its_end() {
    let block = "cloud-hypervisor -v \\\n  --api-socket path=a.sock --kernel k\n".to_string();
    assert_eq!(started(&block), Some("a.sock"));
    assert_eq!(started("cloud-hypervisor --version\n"), None);
    assert_eq!(started("ch-remote --api-socket a.sock ping\n"), None);
    let script = script(&[block, "ch-remote --api-socket a.sock shutdown-vmm\n".to_string()]);
    assert!(script.contains("--kernel k &\n") && script.ends_with("shutdown-vmm\nwait $last\n"), "{script}");
}
