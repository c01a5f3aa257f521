//! XDP programs in BPF's instruction set (RFC 9669), one number for each instruction.

/// The verdicts on a frame (`enum xdp_action`).
pub(crate) const DROP: i32 = 1;
pub(crate) const PASS: i32 = 2;
const SEND_BACK: i32 = 3;

/// Operations of the instruction set.
const MOVE: u8 = 0xb7;
const MOVE_REGISTER: u8 = 0xbf;
const ADD: u8 = 0x07;
const ADD_REGISTER: u8 = 0x0f;
const SHIFT_RIGHT: u8 = 0x77;
const JUMP_IF_ABOVE: u8 = 0x2d;
const JUMP_UNLESS: u8 = 0x55;
const LOAD_WORD: u8 = 0x61;
const LOAD_HALF: u8 = 0x69;
const LOAD_BYTE: u8 = 0x71;
const STORE_WORD: u8 = 0x63;
const STORE_HALF: u8 = 0x6b;
const STORE_HALF_NUMBER: u8 = 0x6a;
const EXIT: u8 = 0x95;

/// The registers: the result; the context, whose first words are the frame's start and end; and these two.
const RESULT: u8 = 0;
const CONTEXT: u8 = 1;
const FRAME: u8 = 2;
const END: u8 = 3;
/// Registers for other values.
const A: u8 = 4;
const B: u8 = 5;
const C: u8 = 6;
const D: u8 = 7;

/// Offsets in an Ethernet frame with an IPv4 packet without options, and an ICMP echo message in it.
const TARGET: i16 = 0;
const SENDER: i16 = 6;
const TYPE: i16 = 12;
const VERSION: i16 = 14;
const PROTOCOL: i16 = 23;
const SOURCE: i16 = 26;
const DESTINATION: i16 = 30;
const MESSAGE: i16 = 34;
const CHECKSUM: i16 = 36;
const LEN: i32 = 42;

fn instruction(operation: u8, to: u8, from: u8, offset: i16, number: i32) -> u64 {
    let bytes = [[operation, from << 4 | to], offset.to_le_bytes()].concat();
    let (low, high) = ([bytes[0], bytes[1], bytes[2], bytes[3]], number.to_le_bytes());
    u64::from(u32::from_le_bytes(low)) | u64::from(u32::from_le_bytes(high)) << 32
}

/// A program that handles all frames in the same way.
pub(crate) fn only(verdict: i32) -> Vec<u64> {
    vec![instruction(MOVE, RESULT, 0, 0, verdict), instruction(EXIT, 0, 0, 0, 0)]
}

/// A program that answers an ICMP echo request with the frame itself, and passes all other frames.
pub(crate) fn answer() -> Vec<u64> {
    // Numbers in network byte order, as this processor reads them.
    let checks: &[(u8, i16, i32)] = &[
        (LOAD_HALF, TYPE, i32::from(0x0800_u16.to_be())),
        (LOAD_BYTE, VERSION, 0x45),
        (LOAD_BYTE, PROTOCOL, 1),
        (LOAD_HALF, MESSAGE, i32::from(0x0800_u16.to_be())),
    ];
    let mut program = vec![
        instruction(LOAD_WORD, FRAME, CONTEXT, 0, 0),
        instruction(LOAD_WORD, END, CONTEXT, 4, 0),
        instruction(MOVE_REGISTER, A, FRAME, 0, 0),
        instruction(ADD, A, 0, 0, LEN),
    ];
    let reply = reply();
    // The number of instructions between a jump and the last two, which pass the frame.
    let rest = |checks_left: usize| (2 * checks_left + reply.len()) as i16;
    program.push(instruction(JUMP_IF_ABOVE, A, END, rest(checks.len()), 0));
    for (number, (load, place, wanted)) in checks.iter().enumerate() {
        program.push(instruction(*load, A, FRAME, *place, 0));
        program.push(instruction(JUMP_UNLESS, A, 0, rest(checks.len() - number - 1), *wanted));
    }
    program.extend(reply);
    program.extend(only(PASS));
    program
}

/// The part that turns the request into a reply and sends it back.
fn reply() -> Vec<u64> {
    let load = |operation, to, place| instruction(operation, to, FRAME, place, 0);
    let store = |operation, from, place| instruction(operation, FRAME, from, place, 0);
    let mut program = vec![
        load(LOAD_WORD, A, TARGET),
        load(LOAD_HALF, B, TARGET + 4),
        load(LOAD_WORD, C, SENDER),
        load(LOAD_HALF, D, SENDER + 4),
        store(STORE_WORD, C, TARGET),
        store(STORE_HALF, D, TARGET + 4),
        store(STORE_WORD, A, SENDER),
        store(STORE_HALF, B, SENDER + 4),
        load(LOAD_WORD, A, SOURCE),
        load(LOAD_WORD, B, DESTINATION),
        store(STORE_WORD, B, SOURCE),
        store(STORE_WORD, A, DESTINATION),
        instruction(STORE_HALF_NUMBER, FRAME, 0, MESSAGE, 0),
    ];
    // The message's sum is less by its old type, 8 in the first byte, so the checksum is more by that.
    program.extend([
        load(LOAD_HALF, A, CHECKSUM),
        instruction(ADD, A, 0, 0, i32::from(0x0800_u16.to_be())),
        instruction(MOVE_REGISTER, B, A, 0, 0),
        instruction(SHIFT_RIGHT, B, 0, 0, 16),
        instruction(ADD_REGISTER, A, B, 0, 0),
        store(STORE_HALF, A, CHECKSUM),
    ]);
    program.extend(only(SEND_BACK));
    program
}
