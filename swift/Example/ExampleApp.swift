// A chat with a bundle: a window for iPhone and Mac. Needs an Xcode project with this folder and the package Anec.

import Anec
import SwiftUI

@main
struct ExampleApp: App {
    var body: some Scene {
        WindowGroup { ChatView() }
    }
}

struct ChatView: View {
    /// Where `anec push BUNDLE hf:owner/name` put the bundle.
    private let source = URL(string: "https://huggingface.co/owner/name/resolve/main")!
    private let folder = URL.applicationSupportDirectory.appending(path: "model.anec")
    private let assistant = Assistant()

    @State private var state = AssistantState.downloading(0)
    @State private var question = ""
    @State private var answer = ""
    @State private var writing: Task<Void, Never>?

    var body: some View {
        VStack(alignment: .leading) {
            switch state {
            case .downloading(let share):
                ProgressView("Downloading", value: share)
            case .loading(let share, let estimate):
                ProgressView("Loading", value: share)
                if let estimate {
                    Text("The first time this takes \(Int(estimate.lowerBound)) to \(Int(estimate.upperBound)) seconds on devices that others measured.")
                        .font(.footnote)
                }
            case .failed(let problem):
                Text(problem).foregroundStyle(.red)
            case .ready:
                ScrollView { Text(answer).frame(maxWidth: .infinity, alignment: .leading) }
                HStack {
                    TextField("Ask", text: $question).onSubmit(ask)
                    if writing == nil {
                        Button("Send", action: ask).disabled(question.isEmpty)
                    } else {
                        Button("Stop") { writing?.cancel() }
                    }
                }
            }
        }
        .padding()
        .task {
            await assistant.start(bundle: folder, from: source) { new in
                Task { @MainActor in state = new }
            }
        }
    }

    private func ask() {
        let message = question
        question = ""
        writing = Task {
            do {
                try await assistant.answer(message) { text in
                    Task { @MainActor in answer = text }
                }
            } catch {
                answer += "\n\n\(error.localizedDescription)"
            }
            writing = nil
        }
    }
}
