// What is generated waits until a text is written; this makes streams and tasks of it, as apps want them.

import Foundation

extension AnecSession {
    /// The pieces of a continuation, as they come. Leaving the loop, or ending its task, cancels the text.
    public func stream(prompt: String, options: TextOptions = TextOptions()) -> AsyncThrowingStream<String, Error> {
        pieces { try self.generate(prompt: prompt, options: options, listener: $0) }
    }

    /// The pieces of an answer to the last message of a chat, as they come.
    public func stream(messages: [ChatTurn], options: TextOptions = TextOptions()) -> AsyncThrowingStream<String, Error> {
        pieces { try self.chat(messages: messages, options: options, listener: $0) }
    }

    private func pieces(
        _ write: @escaping @Sendable (TextListener) throws -> GeneratedText
    ) -> AsyncThrowingStream<String, Error> {
        AsyncThrowingStream { continuation in
            continuation.onTermination = { ending in
                if case .cancelled = ending { self.cancel() }
            }
            // a thread of its own: a model computes for seconds, for which tasks have no threads to spare
            Thread.detachNewThread {
                do {
                    _ = try write(PieceListener(continuation))
                    continuation.finish()
                } catch {
                    continuation.finish(throwing: error)
                }
            }
        }
    }
}

extension AnecModel {
    /// Loads what a text begins with, one function after the other, and says which share is loaded. The thread that calls goes on.
    public func prewarm(progress: @escaping @Sendable (Double) -> Void) async throws {
        try await withCheckedThrowingContinuation { (continuation: CheckedContinuation<Void, Error>) in
            Thread.detachNewThread {
                continuation.resume(with: Result { try self.prewarm(listener: ShareListener(progress)) })
            }
        }
    }
}

/// Gives pieces to a stream; a stream that nobody reads any more wants no more.
private final class PieceListener: TextListener, @unchecked Sendable {
    private let continuation: AsyncThrowingStream<String, Error>.Continuation

    init(_ continuation: AsyncThrowingStream<String, Error>.Continuation) {
        self.continuation = continuation
    }

    func onText(piece: String) throws -> Bool {
        if case .terminated = continuation.yield(piece) { return false }
        return true
    }
}

private final class ShareListener: PrewarmListener, @unchecked Sendable {
    private let progress: @Sendable (Double) -> Void

    init(_ progress: @escaping @Sendable (Double) -> Void) {
        self.progress = progress
    }

    func onProgress(done: UInt64, total: UInt64) throws {
        progress(total == 0 ? 1 : Double(done) / Double(total))
    }
}
