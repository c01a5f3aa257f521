//! Attaches an XDP program to an interface of a guest, in its driver and not after it, and keeps it attached until this
//! is killed: `xdp INTERFACE pass|drop|answer`. Prints `attached` when the program runs.
//!
//! The programs are written by hand ([`programs`]), as guests have no compiler, and busybox no option to attach one.

mod programs;

use std::env;
use std::error::Error;
use std::ffi::CString;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

/// Commands, types and flags of `bpf(2)`.
const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_XDP: u32 = 37;
/// A flag that makes attaching fail unless the driver runs the program.
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;

/// The time limit for the previous program to be detached: the kernel does that some time after its process has ended.
const BUSY_LIMIT: Duration = Duration::from_secs(60);

/// The fields that `BPF_PROG_LOAD` reads. The kernel takes the following fields as zero.
#[repr(C)]
struct Load {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
}

/// The argument of `BPF_LINK_CREATE`.
#[repr(C)]
struct Link {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [interface, verdict] = arguments.as_slice() else { return Err("usage: xdp INTERFACE pass|drop|answer".into()) };
    let program = match verdict.as_str() {
        "pass" => programs::only(programs::PASS),
        "drop" => programs::only(programs::DROP),
        "answer" => programs::answer(),
        other => return Err(format!("no program is called {other}: pass, drop and answer are").into()),
    };
    let name = CString::new(interface.as_str())?;
    // SAFETY: the name ends with a NUL.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    if index == 0 {
        return Err(io::Error::last_os_error().into());
    }
    attach(load(&program)?, index)?;
    println!("attached");
    loop {
        thread::park();
    }
}

/// The file descriptor of the loaded program.
fn load(program: &[u64]) -> Result<u32, Box<dyn Error>> {
    let mut log = vec![0_u8; 64 << 10];
    let license = c"Apache-2.0";
    let load = Load {
        prog_type: BPF_PROG_TYPE_XDP,
        insn_cnt: u32::try_from(program.len())?,
        insns: program.as_ptr() as u64,
        license: license.as_ptr() as u64,
        log_level: 1,
        log_size: u32::try_from(log.len())?,
        log_buf: log.as_mut_ptr() as u64,
    };
    bpf(BPF_PROG_LOAD, &load).map_err(|error| {
        let said = log.split(|byte| *byte == 0).next().unwrap_or_default();
        format!("loading the program: {error}; {}", String::from_utf8_lossy(said)).into()
    })
}

/// Attaches the program until this process ends.
fn attach(program: u32, interface: u32) -> io::Result<()> {
    let link = Link { prog_fd: program, target_ifindex: interface, attach_type: BPF_XDP, flags: XDP_FLAGS_DRV_MODE };
    let began = Instant::now();
    loop {
        match bpf(BPF_LINK_CREATE, &link) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && began.elapsed() < BUSY_LIMIT => {
                thread::sleep(Duration::from_millis(20));
            }
            result => return result.map(drop),
        }
    }
}

/// Calls `bpf(2)` with a command that returns a file descriptor, which stays open.
fn bpf<T>(command: libc::c_int, attributes: &T) -> io::Result<u32> {
    // SAFETY: the kernel reads the attributes, which have the given length, and the slices and the string that they
    // point to, which outlive the call. It writes only to the log, whose length is in the attributes.
    let done = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>()) };
    u32::try_from(done).map_err(|_| io::Error::last_os_error())
}
