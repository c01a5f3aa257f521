//! A guest that is saved, and restored in each mode: the time that takes, and the size of the files.
//!
//! The VM's files are in the first-level machine's memory, and its taps persist, like those of an orchestrator.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

use integration::{Api, Guest, GuestSpec, HostTap, Kernel, Pf, VmmCommand, predicted_vf_address};
use serde_json::json;

use crate::IDLE;
use crate::figures::{Settings, Spread};

/// Modes in which memory is restored.
const MODES: [&str; 3] = ["Copy", "Map", "OnDemand"];
/// Most VFs that have a driver: a vCPU has some 200 interrupt vectors, and a VF needs three.
const MOST_BOUND: usize = 64;
/// The memory of a guest with at most 8 VFs, and with more, in MiB. A driver uses some 4 MiB for its buffers.
const MEMORY: [usize; 2] = [512, 1024];
const PAGE: usize = 4096;
/// The last page of the memory's file names the snapshot.
const TRAILER: u64 = 4096;
/// A test that differs in more than the number of VFs: without huge pages on the host.
const WITHOUT_HUGE_PAGES: &str = "small-pages";

/// Measures a guest with one NIC, or with the number of VFs in the test's name.
pub(crate) fn measure(settings: Settings<'_>) {
    let test = settings.only.unwrap_or("0");
    let vfs: usize = test.parse().unwrap_or(0);
    let huge = if test == WITHOUT_HUGE_PAGES { "never" } else { "madvise" };
    fs::write("/sys/kernel/mm/transparent_hugepage/enabled", huge).unwrap();
    let _taps: Vec<_> = names(vfs).iter().map(|name| HostTap::persistent(name)).collect();
    let folder = tempfile::tempdir().unwrap();
    let what = if vfs == 0 { "one NIC".to_owned() } else { format!("{vfs} VFs") };
    let what = if test == WITHOUT_HUGE_PAGES { format!("{what}, 4 KiB pages") } else { what };

    let api = Api::new("source");
    let mut guest = boot(vfs, &api);
    guest.wait_for(IDLE);
    let saved = folder.path().join("saved");
    let mut times = Vec::new();
    for _ in 0..settings.runs {
        let _ = fs::remove_dir_all(&saved);
        fs::create_dir(&saved).unwrap();
        assert_eq!(api.put("vm.pause").status, 204);
        times.push(put(&api, "vm.snapshot", &json!({ "destination_url": url(&saved) })));
        assert_eq!(api.put("vm.resume").status, 204);
    }
    print(&what, "save, ms", times);
    print_sizes(&what, &saved);
    guest.stop_by(libc::SIGKILL);

    for mode in MODES {
        let (mut ready, mut answered) = (Vec::new(), Vec::new());
        for _ in 0..settings.runs {
            let (api, began) = (Api::new("target"), Instant::now());
            let command = VmmCommand::new().args(["--api-socket", &api.argument()]);
            let mut guest = Guest::restored_by(command);
            assert_eq!(api.get("vmm.ping").status, 200);
            let from_start = began.elapsed();
            let body = json!({ "source_url": url(&saved), "memory_restore_mode": mode, "resume": true });
            ready.push(put(&api, "vm.restore", &body));
            guest.ok("true");
            answered.push(ms(began.elapsed() - from_start));
            assert_eq!(guest.stop_by(libc::SIGKILL).code, None);
        }
        print(&what, &format!("restore by {mode} until a vCPU runs, ms"), ready);
        print(&what, &format!("restore by {mode} until the guest has run a command, ms"), answered);
    }
}

/// The taps of the PF and its VFs, or of a NIC.
fn names(vfs: usize) -> Vec<String> {
    std::iter::once("pf0".to_owned()).chain((0..vfs).map(|index| format!("pf0v{index}"))).collect()
}

/// A guest with all VFs enabled, as many as possible with drivers.
fn boot(vfs: usize, api: &Api) -> Guest {
    let sriov = if vfs == 0 { String::new() } else { format!(",sriov_vfs={vfs}") };
    let memory = format!("size={}M", MEMORY[usize::from(vfs > 8)]);
    let spec = GuestSpec::new(Kernel::V6_12).kernel_argument("tsc=reliable").memory(&memory);
    let spec = spec.net(&format!("id=pf0,tap=pf0,mac=52:54:00:00:00:01{sriov}"));
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    if vfs > MOST_BOUND {
        Pf::find(&mut guest).set_num_vfs_without_drivers(&mut guest, vfs);
        let addresses: Vec<_> = (0..MOST_BOUND).map(predicted_vf_address).collect();
        let bind =
            format!("for vf in {}; do echo $vf > /sys/bus/pci/drivers/virtio-pci/bind; done", addresses.join(" "));
        guest.ok_within(&bind, Duration::from_secs(600));
    } else if vfs > 0 {
        Pf::find(&mut guest).set_num_vfs(&mut guest, vfs);
    }
    guest
}

fn url(folder: &Path) -> String {
    format!("file://{}", folder.display())
}

/// Sends a request that must succeed, and returns the time of its answer in ms.
fn put(api: &Api, endpoint: &str, body: &serde_json::Value) -> f64 {
    let began = Instant::now();
    let answer = api.put_json(endpoint, body);
    let took = ms(began.elapsed());
    assert_eq!(answer.status, 204, "{endpoint}: {}", answer.body);
    took
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

fn print(what: &str, figure: &str, times: Vec<f64>) {
    println!("| {what} | {figure} | {} |", Spread::of(times));
}

/// Prints the size of the files, and the size that they need at least.
fn print_sizes(what: &str, folder: &Path) {
    let memory = folder.join("memory-ranges");
    let found = fs::metadata(&memory).unwrap();
    let (used, allocated) = (used(&memory, found.len() - TRAILER), found.blocks() * 512);
    let state = fs::metadata(folder.join("state.json")).unwrap().len();
    println!("| {what} | pages of memory that are not zero, bytes | {used} | |");
    println!("| {what} | memory-ranges, bytes allocated | {allocated} | {} more |", allocated.saturating_sub(used));
    println!("| {what} | state.json, bytes | {state} | |");
}

/// The size of the pages that are not zero among the first `len` bytes of a file.
fn used(path: &Path, len: u64) -> u64 {
    let file = File::open(path).unwrap();
    let seek = |from: u64, whence| {
        // SAFETY: the call takes plain numbers, and the descriptor is open.
        let found = unsafe { libc::lseek(file.as_raw_fd(), from.cast_signed(), whence) };
        found.try_into().unwrap_or(len)
    };
    let (mut used, mut next) = (0, seek(0, libc::SEEK_DATA));
    let mut page = [0; PAGE];
    while next < len {
        file.read_exact_at(&mut page, next).unwrap();
        used += if page == [0; PAGE] { 0 } else { PAGE as u64 };
        next = seek(next + PAGE as u64, libc::SEEK_DATA);
    }
    used
}
