//! Measures the speed of reading and writing a file: the guest's end of the measurement of `cargo xtask bench
//! virtio-fs`.
//!
//! `filebench TEST FILE SECONDS` measures once and prints one line. The file must have 1 MiB at least.
//!
//! | test | prints |
//! |---|---|
//! | `read` | MB/s read from the start to the end, none of it from the page cache |
//! | `write` | MB/s written over the existing contents, from the start to the end |
//! | `requests` | reads of 4 KiB per second past the page cache, and the 99th percentile of their duration in us |

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed measurement panics and says where")]

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::{Duration, Instant};

use integration::transactions;

/// Bytes per read and write in the bulk tests.
const CHUNK: usize = 128 * 1024;
/// Bytes per request.
const PAGE: usize = 4096;

/// A buffer with the alignment for direct reads.
#[repr(align(4096))]
struct Page([u8; PAGE]);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [test, file, seconds] = arguments.as_slice() else { panic!("usage: filebench TEST FILE SECONDS") };
    let limit = Duration::from_secs_f64(seconds.parse().unwrap());
    let mut options = OpenOptions::new();
    match test.as_str() {
        "read" => println!("{:.1}", bulk(&mut options.read(true).open(file).unwrap(), limit, read_all)),
        "write" => println!("{:.1}", bulk(&mut options.write(true).open(file).unwrap(), limit, write_all)),
        "requests" => {
            let file = options.read(true).custom_flags(libc::O_DIRECT).open(file).unwrap();
            println!("{}", requests(&file, limit));
        }
        _ => panic!("{test}: no such test"),
    }
}

/// Repeats `pass`, which handles the whole file, until that has taken `limit`. Returns the MB handled per second.
fn bulk(file: &mut File, limit: Duration, pass: fn(&mut File)) -> f64 {
    let len = file.metadata().unwrap().len();
    let (mut bytes, mut took) = (0, Duration::ZERO);
    while took < limit {
        file.rewind().unwrap();
        // SAFETY: the descriptor is open as long as `file`.
        assert_eq!(unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) }, 0);
        let started = Instant::now();
        pass(file);
        took += started.elapsed();
        bytes += len;
    }
    bytes as f64 / took.as_secs_f64() / 1e6
}

fn read_all(file: &mut File) {
    let mut chunk = vec![0; CHUNK];
    while file.read(&mut chunk).unwrap() > 0 {}
}

fn write_all(file: &mut File) {
    let chunk = vec![0x5a; CHUNK];
    let mut left = file.metadata().unwrap().len() as usize;
    while left > 0 {
        let part = left.min(CHUNK);
        file.write_all(&chunk[..part]).unwrap();
        left -= part;
    }
}

fn requests(file: &File, limit: Duration) -> String {
    let pages = file.metadata().unwrap().len() / PAGE as u64;
    let mut page = Box::new(Page([0; PAGE]));
    let mut state = 1_u64;
    transactions(limit, || {
        // xorshift64.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        file.read_exact_at(&mut page.0, state % pages * PAGE as u64).unwrap();
    })
}
