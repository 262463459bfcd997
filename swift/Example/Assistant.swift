// What the example app does, without its windows: get the bundle, load it, answer.

import Anec
import Foundation

#if canImport(FoundationNetworking)
import FoundationNetworking
#endif
#if os(iOS)
import os
#endif

/// Where the app is.
enum AssistantState: Sendable {
    case downloading(Double)
    /// The share that is loaded, and how many seconds a first load takes, as others measured it.
    case loading(Double, estimate: ClosedRange<Double>?)
    case ready
    case failed(String)
}

/// A model and a chat with it.
actor Assistant {
    private var session: AnecSession?
    private var turns: [ChatTurn] = []

    /// Gets the bundle, if it isn't there yet, and loads it.
    func start(bundle: URL, from source: URL, report: @escaping @Sendable (AssistantState) -> Void) async {
        do {
            try await BundleDownload(source: source, folder: bundle).run { report(.downloading($0)) }
            let model = try AnecModel.open(path: bundle.path, maxMemoryBytes: Self.memoryLimit())
            let estimate = model.prewarmEstimate().map { $0.leastSeconds...$0.mostSeconds }
            try await model.prewarm { report(.loading($0, estimate: estimate)) }
            session = model.session()
            report(.ready)
        } catch let error as AnecError {
            report(.failed(Self.words(of: error)))
        } catch {
            report(.failed(error.localizedDescription))
        }
    }

    /// Answers a message; what is said so far is part of it.
    func answer(_ message: String, show: @escaping @Sendable (String) -> Void) async throws {
        guard let session else { return }
        turns.append(ChatTurn(role: "user", content: message))
        var answer = ""
        for try await piece in session.stream(messages: turns, options: TextOptions(maxTokens: 512, temperature: 0.7)) {
            answer += piece
            show(answer)
        }
        turns.append(ChatTurn(role: "assistant", content: answer))
    }

    /// Half of what the system still gives the app: the other half is for its windows and caches.
    static func memoryLimit() -> UInt64? {
        #if os(iOS)
        UInt64(os_proc_available_memory()) / 2
        #else
        nil
        #endif
    }

    static func words(of error: AnecError) -> String {
        switch error {
        case .NoBundle(let message, let help), .DamagedBundle(let message, let help), .OtherTask(let message, let help),
            .TextTooLong(let message, let help), .WrongArgument(let message, let help), .System(let message, let help):
            help.isEmpty ? message : "\(message): \(help)"
        case .Listener(let message): message
        }
    }
}
