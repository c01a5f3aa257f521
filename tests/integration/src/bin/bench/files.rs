//! A folder of the host that the guest mounts through virtio-fs, served by virtiofsd.

use std::fs;

use integration::StoragePeer;

use crate::figures::{Bench, Settings, Test};
use crate::{IDLE, boot};

/// The size of the file that is read and written.
const BYTES: usize = 16 << 20;
/// Files of virtiofsd and its libraries. They are read before the measurement, as the machine's clock jumps while it
/// waits for its disk.
const PROGRAM: [&str; 5] = [
    "/usr/libexec/virtiofsd",
    "/usr/lib/x86_64-linux-gnu/libc.so.6",
    "/usr/lib/x86_64-linux-gnu/libgcc_s.so.1",
    "/usr/lib/x86_64-linux-gnu/libcap-ng.so.0",
    "/usr/lib/x86_64-linux-gnu/libseccomp.so.2",
];
const TESTS: [Test; 3] = [
    Test { name: "read", figures: &["file read, MB/s"] },
    Test { name: "write", figures: &["file written, MB/s"] },
    Test { name: "requests", figures: &["reads of 4 KiB a second", "their 99th percentile, us"] },
];

/// Measures a file of the host, which is in its memory.
pub(crate) fn measure(what: &str, settings: Settings<'_>) {
    let folder = tempfile::tempdir().unwrap();
    let shared = folder.path().join("shared");
    fs::create_dir(&shared).unwrap();
    fs::write(shared.join("file"), vec![0x5a; BYTES]).unwrap();
    for file in PROGRAM {
        fs::read(file).unwrap();
    }
    let virtiofsd = StoragePeer::virtiofsd(folder.path(), "fs.sock", &shared);
    let mut guest = boot(&["--fs", &format!("tag=host,socket={}", virtiofsd.socket().display())]);
    guest.load("virtiofs");
    guest.ok("mkdir -p /mnt && mount -t virtiofs host /mnt && cat /mnt/file > /dev/null");
    guest.wait_for(IDLE);
    let mut bench = Bench { guest: &mut guest, settings };
    bench.measure_by(what, &TESTS, |test| format!("filebench {test} /mnt/file {}", settings.seconds));
    guest.ok("umount /mnt");
    guest.power_off();
}
